"""Many requests at once: the engine, and what it is made of.

`engine` is the thread and its queue, `batch` the round loop of many requests, `packed` one forward for all
of them, `prefix` what finished requests leave for others, `memory` what a request will need.
"""

from .engine import Engine, EngineMetrics, EngineOptions
from .request import EngineBusy, EngineClosed, EngineError, Event, Request, Stream

__all__ = ["Engine", "EngineBusy", "EngineClosed", "EngineError", "EngineMetrics", "EngineOptions", "Event", "Request",
           "Stream"]
