"""Goes into the checkpoint, as the code of such a configuration does there."""

from transformers import Phi3Config


class Phi3VConfig(Phi3Config):
    """That of the language model, with ``img_processor`` and ``embd_layer`` beside it."""

    model_type = "phi3_v"
