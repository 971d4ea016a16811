"""Looking at a model before anything is decided."""

from typing import TYPE_CHECKING

from trundle.lazy import lazy

if TYPE_CHECKING:
    from trundle.measure.costs import Cost as Cost
    from trundle.measure.costs import PartCost as PartCost
    from trundle.measure.costs import cost as cost
    from trundle.measure.costs import predict as predict
    from trundle.measure.savings import Saving as Saving
    from trundle.measure.savings import list_savings as list_savings
    from trundle.measure.token_counts import TokenCounts as TokenCounts
    from trundle.measure.token_counts import count_tokens as count_tokens
    from trundle.measure.token_counts import spilling as spilling
    from trundle.measure.token_counts import tfidf_scores as tfidf_scores
    from trundle.measure.token_counts import tokenised as tokenised

__getattr__ = lazy(
    __name__,
    {
        "Cost": "costs",
        "PartCost": "costs",
        "cost": "costs",
        "predict": "costs",
        "Saving": "savings",
        "list_savings": "savings",
        "TokenCounts": "token_counts",
        "count_tokens": "token_counts",
        "spilling": "token_counts",
        "tfidf_scores": "token_counts",
        "tokenised": "token_counts",
    },
)
