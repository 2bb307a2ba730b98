"""The drafter protocol and the zoo."""

from specjax.drafters._adaptive import PassCosts, adaptive, check_chain
from specjax.drafters._combine import fallback, truncate
from specjax.drafters._costs import MeasuredFor, load_costs, save_costs
from specjax.drafters._datastore import (
    Datastore,
    build_datastore,
    documents_of,
    extend_datastore,
    load_datastore,
    save_datastore,
)
from specjax.drafters._drawing import Draws
from specjax.drafters._early_exit import early_exit
from specjax.drafters._from_model import (
    from_model,
    layer_skip,
    lower_precision,
    sparse_kv,
)
from specjax.drafters._lookahead import lookahead
from specjax.drafters._model import model
from specjax.drafters._names import (
    DRAFT_MODEL,
    REGISTRY,
    SELF_DRAFTS,
    by_name,
    check_name,
    draft_shape,
    for_target,
    usages,
)
from specjax.drafters._plain import plain
from specjax.drafters._prompt_lookup import prompt_lookup
from specjax.drafters._protocol import (
    BoundDrafter,
    DraftContext,
    Drafter,
    DrafterSpec,
    Proposal,
    Scored,
    TargetView,
    check_gamma,
    check_target,
    match_noise,
    pending_token,
    stateless,
    unbind,
)
from specjax.drafters._quantized import QUANTIZED_GROUPS, quantized
from specjax.drafters._self_draft import self_draft
from specjax.drafters._suffix import suffix
from specjax.drafters._token_recycling import successor_table, token_recycling

__all__ = [
    "DRAFT_MODEL",
    "QUANTIZED_GROUPS",
    "REGISTRY",
    "SELF_DRAFTS",
    "BoundDrafter",
    "Datastore",
    "DraftContext",
    "Drafter",
    "DrafterSpec",
    "Draws",
    "MeasuredFor",
    "PassCosts",
    "Proposal",
    "Scored",
    "TargetView",
    "adaptive",
    "build_datastore",
    "by_name",
    "check_chain",
    "check_gamma",
    "check_name",
    "check_target",
    "documents_of",
    "draft_shape",
    "early_exit",
    "extend_datastore",
    "fallback",
    "for_target",
    "from_model",
    "layer_skip",
    "load_costs",
    "load_datastore",
    "lookahead",
    "lower_precision",
    "match_noise",
    "model",
    "pending_token",
    "plain",
    "prompt_lookup",
    "quantized",
    "save_costs",
    "save_datastore",
    "self_draft",
    "sparse_kv",
    "stateless",
    "successor_table",
    "suffix",
    "token_recycling",
    "truncate",
    "unbind",
    "usages",
]
