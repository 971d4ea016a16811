"""The best model that fits a budget: what could be cut, what it would weigh and take, which trials are worth their time.

budget      12MB, 10x, 5ms, 20M-params → limits
candidates  the search space as plain data, sized by arithmetic, thinned to what fits and nothing else beats
speed       this machine measured on small cuts of the model, and latencies told from that
halving     how many candidates get how much of the time, round by round
prospects   what could be had: the candidates of this model that fit, and what is wrong with a budget
trials      candidates cut and trained for a while, the winner to the end
shipping    the graph of the winner, or what is left where it can't be made
search      all of it: size, time, try, train the winner, export, prove
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trundle.lazy import lazy

if TYPE_CHECKING:
    from trundle.planner.budget import Budget as Budget
    from trundle.planner.budget import parse_budget as parse_budget
    from trundle.planner.outcome import Outcome as Outcome
    from trundle.planner.search import compress_to_budget as compress_to_budget

__getattr__ = lazy(
    __name__,
    {
        "Budget": "budget",
        "parse_budget": "budget",
        "Outcome": "outcome",
        "compress_to_budget": "search",
    },
)
