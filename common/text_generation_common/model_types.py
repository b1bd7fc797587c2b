"""Models of texts and images whose text model is served."""

from collections.abc import Mapping

# By the model_type of config.json, that of text_config where it does not say its own. These models compute a text
# without images as their text model alone would.
MULTIMODAL: Mapping[str, str] = {
    "aya_vision": "cohere2",
    "gemma3": "gemma3_text",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
}
