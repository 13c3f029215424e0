"""Features on disk: equal to the target's own in bfloat16, resumable, and refused when damaged or of something else."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlx_dspark.errors import FormatError
from mlx_dspark.train import store
from mlx_dspark.train.data import Corpus
from mlx_dspark.train.store import Layout, StoredFeatures, check_room, make_store, missing_bytes

LENGTHS = [5, 9, 3, 7, 6]
WIDTH, TAPS = 12, 2


def layout(identity="a"):
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    ids = np.arange(offsets[-1], dtype=np.int32)
    corpus = Corpus(ids, np.ones(len(ids), np.uint8), offsets, [""] * len(LENGTHS))
    return Layout(corpus, WIDTH, TAPS, {"target": identity, "taps": [1, 3]})


def features(rows, ids):
    """Something that tells positions apart: taps 2 wide, states 1 wide, times 4."""
    values = mx.array(ids)[..., None] + mx.arange(WIDTH) / 8
    return values[..., :8], values[..., 8:]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(store, "SHARD_BYTES", 14 * WIDTH * 2)  # 5 + 9, 3 + 7, 6
    monkeypatch.setattr(store, "BATCH_TOKENS", 9)


def test_what_is_read_is_what_the_target_said(tmp_path):
    made = layout()
    assert [list(rows) for rows in made.shards()] == [[0, 1], [2, 3], [4]]
    assert missing_bytes(tmp_path, made) == made.nbytes == 30 * WIDTH * 2
    make_store(tmp_path, made, features)
    assert missing_bytes(tmp_path, made) == 0
    rows = [4, 1, 2]
    ids, _, lengths = made.corpus.rows(rows)
    taps, last = StoredFeatures(tmp_path, made)(rows, ids)
    wanted = features(rows, ids)
    for place, length in enumerate(lengths):
        assert mx.array_equal(taps[place, :length], wanted[0][place, :length].astype(mx.bfloat16))
        assert mx.array_equal(last[place, :length], wanted[1][place, :length].astype(mx.bfloat16))
        assert not taps[place, length:].any()


def test_making_a_store_continues_behind_what_is_complete(tmp_path):
    made, seen = layout(), []

    def failing(rows, ids):
        seen.extend(rows)
        if 3 in rows:
            raise OSError(28, "No space left on device")
        return features(rows, ids)

    with pytest.raises(ValueError, match=r"bin could not be written \(No space left.*complete shards are kept"):
        make_store(tmp_path, made, failing)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "shard-00000.bin"]
    with pytest.raises(FormatError, match="shard-00001.bin is missing"):
        StoredFeatures(tmp_path, made)
    seen.clear()
    make_store(tmp_path, made, lambda rows, ids: (seen.extend(rows), features(rows, ids))[1])
    assert seen == [2, 3, 4]
    StoredFeatures(tmp_path, made)


def test_damage_is_found(tmp_path):
    make_store(tmp_path, layout(), features)
    path = tmp_path / "shard-00001.bin"
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    with pytest.raises(FormatError, match="shard-00001.bin is damaged"):
        StoredFeatures(tmp_path, layout())
    path.unlink()  # as the message says
    assert missing_bytes(tmp_path, layout()) == len(content)
    make_store(tmp_path, layout(), features)
    StoredFeatures(tmp_path, layout())
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(FormatError, match="index.json is damaged"):
        StoredFeatures(tmp_path, layout())


def test_features_of_another_target_are_refused(tmp_path):
    make_store(tmp_path, layout(), features)
    with pytest.raises(FormatError, match="was made with target a, now it is b"):
        missing_bytes(tmp_path, layout("b"))


def test_room_is_asked_for_first(tmp_path, monkeypatch):
    monkeypatch.setattr(store.shutil, "disk_usage", lambda place: SimpleNamespace(free=10**9))
    check_room(tmp_path / "new", 10**9)
    with pytest.raises(ValueError, match="take 2.0 GB and 1.0 GB are free"):
        check_room(tmp_path / "new", 2 * 10**9)


def test_the_command_asks_before_it_writes(tmp_path):
    from click.testing import CliRunner

    from mlx_dspark.train.command import command

    text = tmp_path / "text.txt"
    text.write_text("import os\nfor name in os.listdir('.'):\n    print(name)\n" * 20)
    common = ["--data", str(text), "--layers", "1", "--rank", "4", "--gamma", "2", "--taps", "1", "--anchors", "2",
              "--max-length", "32", "--batch", "1", "--steps", "2", "--features", str(tmp_path / "features")]
    asked = CliRunner().invoke(command, [*common, "--out", str(tmp_path / "one")])
    assert asked.exit_code == 1 and "GB: give --yes to write them" in asked.output
    assert not (tmp_path / "features").exists() and not (tmp_path / "one").exists()
    done = CliRunner().invoke(command, [*common, "--out", str(tmp_path / "one"), "--yes"])
    assert done.exit_code == 0, done.output
    again = CliRunner().invoke(command, [*common, "--out", str(tmp_path / "two")])  # nothing to write, nothing asked
    assert again.exit_code == 0, again.output
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
