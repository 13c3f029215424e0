"""A short run of the load test, and that it notices what it is there to notice."""

import asyncio
import itertools
import json
import sys

from click.testing import CliRunner
from helpers import embedded_pair
from load import Options, growth, load, main
from stand_in import StandIn, plain_model, saying, serving

from mlx_dspark.serve.request import EngineError

SHORT = Options(clients=8, seconds=1, leave=0.2, malformed=0.3, jobs=8, longest=8, least=8)


def run(engine, options=SHORT):
    with serving(engine, plain_model()) as address:
        return asyncio.run(load(address, options))


def test_many_clients_at_once():
    result = run(StandIn(lambda request: saying(*embedded_pair().tokenizer.decode(request.prompt).split("o"))(request)))
    assert result["failed"] == {}, result
    assert set(result["statuses"]) <= {"200", "400", "404", "413", "415", "422"} and len(result["statuses"]) > 3
    assert result["memory_watched"] == sys.platform.startswith("linux")
    assert result["answers"] > 10 and result["left"] > 3 and result["refused"] > 5


def test_a_mixed_up_answer_is_noticed():
    number = itertools.count()
    result = run(StandIn(lambda request: saying("mine" if next(number) % 9 else "yours")(request)),
                 Options(clients=2, seconds=1, leave=0, malformed=0, jobs=3))
    assert result["failed"]["mixed"] > 0 and result["examples"]["mixed"]


def test_a_failing_engine_is_noticed():
    number = itertools.count()

    def answers(request):
        if next(number) > 6:
            raise EngineError("the engine failed")
        return saying("fine")(request)

    result = run(StandIn(answers), Options(clients=2, seconds=1, leave=0, malformed=0, jobs=3))
    assert result["failed"]["server errors"] > 0 and result["failed"]["lost"] > 0


def test_memory_that_cannot_be_watched_is_told(monkeypatch):
    """As on macOS, where the process has no such metric."""
    monkeypatch.setattr("mlx_dspark.server.metrics.ProcessCollector", lambda registry: None)
    monkeypatch.setattr("load.jobs_of", lambda options: [{"prompt": "x", "max_tokens": 4}])
    with serving(StandIn(saying("fine")), plain_model()) as address:
        done = CliRunner().invoke(main, ["--url", address, "--minutes", "0.01", "--clients", "2"])
    result = json.loads(done.stdout)
    assert (done.exit_code, result["failed"]) == (0, {}) and result["memory_growth"] is None
    assert result["memory_watched"] is False and "memory was not watched" in done.stderr


def test_growing_memory_is_noticed():
    assert growth([(i, 100) for i in range(30)]) == 1 and growth([]) is None
    assert growth([(i, 100 + i) for i in range(30)]) > 1.05
