"""Models as they come, are cut, and leave: always a SentenceTransformer."""

from typing import TYPE_CHECKING

from trundle.lazy import lazy

if TYPE_CHECKING:
    from trundle.model.anatomy import FAMILIES as FAMILIES
    from trundle.model.attention import looks_both_ways as looks_both_ways
    from trundle.model.attention import with_both_ways as with_both_ways
    from trundle.model.device import free_gpu_memory as free_gpu_memory
    from trundle.model.device import memory_told as memory_told
    from trundle.model.encode import embedder as embedder
    from trundle.model.encode import labelling_embedder as labelling_embedder
    from trundle.model.heads import check_untruncated as check_untruncated
    from trundle.model.heads import copy_of as copy_of
    from trundle.model.heads import linear_head as linear_head
    from trundle.model.heads import name_labels as name_labels
    from trundle.model.heads import normalises as normalises
    from trundle.model.heads import reinitialised as reinitialised
    from trundle.model.heads import rescale_head as rescale_head
    from trundle.model.heads import with_linear_head as with_linear_head
    from trundle.model.heads import with_mean_pooling as with_mean_pooling
    from trundle.model.heads import with_new_head as with_new_head
    from trundle.model.heads import with_prompts as with_prompts
    from trundle.model.heads import without_head as without_head
    from trundle.model.identity import model_digest as model_digest
    from trundle.model.identity import weights_digest as weights_digest
    from trundle.model.layout import Layout as Layout
    from trundle.model.layout import check_blocks as check_blocks
    from trundle.model.layout import layout_of as layout_of
    from trundle.model.layout import shrunk as shrunk
    from trundle.model.loading import is_embedder as is_embedder
    from trundle.model.loading import load as load
    from trundle.model.loading import nested_in as nested_in
    from trundle.model.matrices import Matrix as Matrix
    from trundle.model.matrices import block_weights as block_weights
    from trundle.model.matrices import has_bias as has_bias
    from trundle.model.matrices import prunable as prunable
    from trundle.model.matrices import put_map as put_map
    from trundle.model.matrices import says_pruned as says_pruned
    from trundle.model.matrices import weight_of as weight_of
    from trundle.model.matrices import with_zeros as with_zeros
    from trundle.model.merge_tree import NO_MERGES as NO_MERGES
    from trundle.model.merge_tree import MergeTree as MergeTree
    from trundle.model.nested import NarrowModel as NarrowModel
    from trundle.model.nested_file import NESTED_FILE as NESTED_FILE
    from trundle.model.nested_file import Map as Map
    from trundle.model.nested_file import Nested as Nested
    from trundle.model.nested_file import at_width as at_width
    from trundle.model.nested_file import is_trained as is_trained
    from trundle.model.nested_file import pooled_width as pooled_width
    from trundle.model.nested_file import untrained as untrained
    from trundle.model.pairing import check_pairable as check_pairable
    from trundle.model.pairing import is_pair as is_pair
    from trundle.model.pairing import one_route as one_route
    from trundle.model.pairing import paired as paired
    from trundle.model.pooling import with_pooling as with_pooling
    from trundle.model.prompts import check_prompts_are_pooled as check_prompts_are_pooled
    from trundle.model.prompts import prompts_by_role as prompts_by_role
    from trundle.model.reorder import Orders as Orders
    from trundle.model.reorder import reordered as reordered
    from trundle.model.rounding import BLOCK as BLOCK
    from trundle.model.rounding import computing_on_grid as computing_on_grid
    from trundle.model.rounding import fits_grid as fits_grid
    from trundle.model.rounding import grid_bytes as grid_bytes
    from trundle.model.rounding import grid_weights as grid_weights
    from trundle.model.rounding import on_grid as on_grid
    from trundle.model.rounding import put_on_grid as put_on_grid
    from trundle.model.rounding import rounded as rounded
    from trundle.model.rounding import token_rows as token_rows
    from trundle.model.saving import save as save
    from trundle.model.saving import weight_bytes as weight_bytes
    from trundle.model.selection import Select as Select
    from trundle.model.selection import Selection as Selection
    from trundle.model.selection import default_select as default_select
    from trundle.model.selection import narrow_cut as narrow_cut
    from trundle.model.selection import part_of as part_of
    from trundle.model.static import shares_by_rank as shares_by_rank
    from trundle.model.static import static_model as static_model
    from trundle.model.static import static_shape as static_shape
    from trundle.model.static import static_table as static_table
    from trundle.model.static import static_with as static_with
    from trundle.model.static import token_counts as token_counts
    from trundle.model.surgery import Cut as Cut
    from trundle.model.surgery import cut as cut
    from trundle.model.surgery import cut_backbone as cut_backbone
    from trundle.model.surgery import transformer_of as transformer_of
    from trundle.model.surgery import with_modules as with_modules
    from trundle.model.token_map import cut_with_map as cut_with_map
    from trundle.model.token_map import has_token_map as has_token_map
    from trundle.model.vocabulary import Vocabulary as Vocabulary
    from trundle.model.vocabulary import read_vocabulary as read_vocabulary
    from trundle.model.vocabulary import rebuilt_backend as rebuilt_backend
    from trundle.model.vocabulary import token_vectors as token_vectors

__getattr__ = lazy(
    __name__,
    {
        "FAMILIES": "anatomy",
        "looks_both_ways": "attention",
        "with_both_ways": "attention",
        "free_gpu_memory": "device",
        "memory_told": "device",
        "embedder": "encode",
        "labelling_embedder": "encode",
        "check_untruncated": "heads",
        "linear_head": "heads",
        "name_labels": "heads",
        "normalises": "heads",
        "rescale_head": "heads",
        "reinitialised": "heads",
        "with_linear_head": "heads",
        "without_head": "heads",
        "copy_of": "heads",
        "with_mean_pooling": "heads",
        "with_new_head": "heads",
        "with_prompts": "heads",
        "model_digest": "identity",
        "weights_digest": "identity",
        "Layout": "layout",
        "check_blocks": "layout",
        "layout_of": "layout",
        "shrunk": "layout",
        "is_embedder": "loading",
        "load": "loading",
        "nested_in": "loading",
        "NarrowModel": "nested",
        "NESTED_FILE": "nested_file",
        "Map": "nested_file",
        "Nested": "nested_file",
        "at_width": "nested_file",
        "is_trained": "nested_file",
        "pooled_width": "nested_file",
        "untrained": "nested_file",
        "check_pairable": "pairing",
        "is_pair": "pairing",
        "one_route": "pairing",
        "paired": "pairing",
        "with_pooling": "pooling",
        "check_prompts_are_pooled": "prompts",
        "prompts_by_role": "prompts",
        "Orders": "reorder",
        "reordered": "reorder",
        "BLOCK": "rounding",
        "computing_on_grid": "rounding",
        "fits_grid": "rounding",
        "grid_bytes": "rounding",
        "grid_weights": "rounding",
        "on_grid": "rounding",
        "put_on_grid": "rounding",
        "rounded": "rounding",
        "token_rows": "rounding",
        "save": "saving",
        "weight_bytes": "saving",
        "Select": "selection",
        "Selection": "selection",
        "default_select": "selection",
        "narrow_cut": "selection",
        "part_of": "selection",
        "shares_by_rank": "static",
        "static_model": "static",
        "static_shape": "static",
        "static_table": "static",
        "static_with": "static",
        "token_counts": "static",
        "Cut": "surgery",
        "cut": "surgery",
        "cut_backbone": "surgery",
        "transformer_of": "surgery",
        "with_modules": "surgery",
        "NO_MERGES": "merge_tree",
        "MergeTree": "merge_tree",
        "cut_with_map": "token_map",
        "has_token_map": "token_map",
        "Vocabulary": "vocabulary",
        "read_vocabulary": "vocabulary",
        "rebuilt_backend": "vocabulary",
        "token_vectors": "vocabulary",
        "Matrix": "matrices",
        "block_weights": "matrices",
        "prunable": "matrices",
        "has_bias": "matrices",
        "put_map": "matrices",
        "says_pruned": "matrices",
        "weight_of": "matrices",
        "with_zeros": "matrices",
    },
)
