"""Settings of scripts/generate.py: its flags by name, with their defaults."""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    config = ConfigDict()
    # One of the first two; the third goes with the second.
    config.prompt = config_dict.placeholder(str)
    config.prompts = config_dict.placeholder(str)
    config.output = config_dict.placeholder(str)

    config.model = "smollm2-135m-instruct"
    config.dtype = "bfloat16"
    config.batch_size = 4
    config.capacity = config_dict.placeholder(int)  # None: fits the longest prompt

    config.drafter = "prompt_lookup"
    config.datastore = config_dict.placeholder(str)  # for the drafter suffix
    config.draft_model = config_dict.placeholder(str)  # for the drafter model
    config.draft_dtype = config_dict.placeholder(str)  # None: that of dtype
    config.adaptive = False
    config.costs = config_dict.placeholder(str)  # for adaptive; None: measured
    config.gamma = 6
    config.rule = "coupled"
    config.exact = False

    config.temperature = 0.0
    config.top_k = 0
    config.top_p = 1.0
    config.min_p = 0.0
    config.seed = 0
    config.max_new_tokens = 128
    config.min_new_tokens = 0
    config.stop = ()
    config.max_drafts = config_dict.placeholder(int)  # None: what the drafter likes
    config.repetition_penalty = 1.0
    config.presence_penalty = 0.0
    config.frequency_penalty = 0.0
    config.logit_bias = config_dict.placeholder(str)  # JSON text or @file
    config.banned_ids = ()
    config.regex = config_dict.placeholder(str)
    config.json_schema = config_dict.placeholder(str)  # JSON text or @file
    config.chat = config_dict.placeholder(bool)  # None: where there is a template
    config.ignore_eos = False

    config.ids = True
    config.logprobs = False
    config.top_logprobs = 0
    config.n_samples = 1
    return config
