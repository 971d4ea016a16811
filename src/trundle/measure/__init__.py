"""Looking at a model before anything is decided."""

from typing import TYPE_CHECKING

from trundle.lazy import lazy

if TYPE_CHECKING:
    from trundle.measure.clusters import nearest as nearest
    from trundle.measure.clusters import representatives as representatives
    from trundle.measure.costs import Cost as Cost
    from trundle.measure.costs import PartCost as PartCost
    from trundle.measure.costs import cost as cost
    from trundle.measure.costs import predict as predict
    from trundle.measure.costs import predict_static as predict_static
    from trundle.measure.importance import Importance as Importance
    from trundle.measure.importance import measure_importance as measure_importance
    from trundle.measure.layers import LayerCurve as LayerCurve
    from trundle.measure.layers import measure_curve as measure_curve
    from trundle.measure.pruned_matrix import PrunedMatrix as PrunedMatrix
    from trundle.measure.savings import Saving as Saving
    from trundle.measure.savings import layer_savings as layer_savings
    from trundle.measure.savings import list_savings as list_savings
    from trundle.measure.takeover import measure_moments as measure_moments
    from trundle.measure.takeover import taken_over as taken_over
    from trundle.measure.token_choice import best_tokens as best_tokens
    from trundle.measure.token_choice import passed_down as passed_down
    from trundle.measure.token_counts import TokenCounts as TokenCounts
    from trundle.measure.token_counts import count_tokens as count_tokens
    from trundle.measure.token_counts import spilling as spilling
    from trundle.measure.token_counts import tokenised as tokenised
    from trundle.measure.token_lengths import Lengths as Lengths
    from trundle.measure.token_lengths import compare_lengths as compare_lengths
    from trundle.measure.token_lengths import lengths_when_mapped as lengths_when_mapped
    from trundle.measure.token_ranking import Ranking as Ranking
    from trundle.measure.token_ranking import absent_characters as absent_characters
    from trundle.measure.token_ranking import behind_what_occurs as behind_what_occurs
    from trundle.measure.token_ranking import held_out_texts as held_out_texts
    from trundle.measure.token_ranking import rank_tokens as rank_tokens
    from trundle.measure.token_ranking import what_is_missing as what_is_missing
    from trundle.measure.token_scores import attention_scores as attention_scores
    from trundle.measure.token_scores import tfidf_scores as tfidf_scores
    from trundle.measure.weight_choice import best_neurons as best_neurons
    from trundle.measure.weight_choice import choose as choose
    from trundle.measure.weight_choice import how_many as how_many
    from trundle.measure.weight_choice import neuron_scores as neuron_scores
    from trundle.measure.weight_choice import two_of_four as two_of_four
    from trundle.measure.weight_map import WeightMap as WeightMap
    from trundle.measure.weight_map import count_alignment as count_alignment
    from trundle.measure.weight_scores import alignment as alignment
    from trundle.measure.weight_scores import dai as dai
    from trundle.measure.weight_scores import random_scores as random_scores
    from trundle.measure.weight_scores import wanda as wanda

__getattr__ = lazy(
    __name__,
    {
        "Cost": "costs",
        "PartCost": "costs",
        "cost": "costs",
        "predict": "costs",
        "predict_static": "costs",
        "Importance": "importance",
        "measure_importance": "importance",
        "LayerCurve": "layers",
        "measure_curve": "layers",
        "Saving": "savings",
        "layer_savings": "savings",
        "list_savings": "savings",
        "best_tokens": "token_choice",
        "passed_down": "token_choice",
        "nearest": "clusters",
        "representatives": "clusters",
        "TokenCounts": "token_counts",
        "count_tokens": "token_counts",
        "spilling": "token_counts",
        "tokenised": "token_counts",
        "Lengths": "token_lengths",
        "compare_lengths": "token_lengths",
        "lengths_when_mapped": "token_lengths",
        "Ranking": "token_ranking",
        "held_out_texts": "token_ranking",
        "absent_characters": "token_ranking",
        "behind_what_occurs": "token_ranking",
        "rank_tokens": "token_ranking",
        "what_is_missing": "token_ranking",
        "attention_scores": "token_scores",
        "tfidf_scores": "token_scores",
        "measure_moments": "takeover",
        "taken_over": "takeover",
        "best_neurons": "weight_choice",
        "choose": "weight_choice",
        "how_many": "weight_choice",
        "neuron_scores": "weight_choice",
        "two_of_four": "weight_choice",
        "PrunedMatrix": "pruned_matrix",
        "WeightMap": "weight_map",
        "count_alignment": "weight_map",
        "alignment": "weight_scores",
        "dai": "weight_scores",
        "random_scores": "weight_scores",
        "wanda": "weight_scores",
    },
)
