"""What the texts of each LoRA adapter take, on /metrics, by the adapter's name. A server without adapters has none of
these series."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter

MAX_NAMES = 32
OTHER = "other"  # the name of all adapters beyond MAX_NAMES
COUNTERS = {
    "tgi_adapter_texts": "Texts that have begun, by the LoRA adapter",
    "tgi_adapter_prompt_tokens": "Prompt tokens of texts that have begun, by the LoRA adapter",
    "tgi_adapter_output_tokens": "Tokens made, those of texts that did not end included, by the LoRA adapter",
}


class AdapterUsage:
    def __init__(self, names: Iterable[str] = (), registry: CollectorRegistry | None = None) -> None:
        """Adds the counters to the registry, with all their labels, if there are names."""
        kept = list(dict.fromkeys(names))
        shown = [name for name in kept if name != OTHER][:MAX_NAMES]
        self._labels = {name: name if name in shown else OTHER for name in kept}
        self._counters = [
            Counter(name, text, ["adapter"], registry=registry) for name, text in COUNTERS.items() if self._labels
        ]
        for counter in self._counters:
            for label in dict.fromkeys(self._labels.values()):
                counter.labels(adapter=label)

    def count_text(self, name: str, prompt_tokens: int, output_tokens: int) -> None:
        """`name`: that of the text's adapter; "": none."""
        if (label := self._labels.get(name)) is not None:
            for counter, count in zip(self._counters, (1, prompt_tokens, output_tokens), strict=True):
                counter.labels(adapter=label).inc(count)
