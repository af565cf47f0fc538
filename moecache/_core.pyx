"""The public API of the deciding part, `moecache._decide`: activation counts, history match, chance of use, victims, prefetches.

No torch, no I/O, no threads. `docs/architecture.md` has the order of its modules.
"""

from moecache._decide.batch import BatchState
from moecache._decide.core import Core
from moecache._decide.dispatch import Dispatcher
from moecache._decide.estimates import Estimates
from moecache._decide.evict import FEATURES, POLICY_CODES, Evictor
from moecache._decide.forecast import ForecastState, ForecastWeights
from moecache._decide.gil import GilPolicy
from moecache._decide.history import HistoryStore, RunningMatch
from moecache._decide.layout import Layout
from moecache._decide.pairs import PairTable
from moecache._decide.plan import Plan
from moecache._decide.prefetch import Prefetcher
from moecache._decide.request import RequestState
from moecache._decide.reuse import OnlineWeights, ReusePredictor
from moecache._decide.slots import PrefetchLedger, SlotTable
from moecache._decide.step import Account, OpenSteps, Step
from moecache._decide.trust import Trust

__all__ = [
    "FEATURES",
    "POLICY_CODES",
    "Account",
    "BatchState",
    "Core",
    "Dispatcher",
    "Estimates",
    "Evictor",
    "ForecastState",
    "ForecastWeights",
    "GilPolicy",
    "HistoryStore",
    "Layout",
    "OnlineWeights",
    "OpenSteps",
    "PairTable",
    "Plan",
    "PrefetchLedger",
    "Prefetcher",
    "RequestState",
    "ReusePredictor",
    "RunningMatch",
    "SlotTable",
    "Step",
    "Trust",
]
