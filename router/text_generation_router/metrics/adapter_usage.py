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
    def __init__(
        self, names: Iterable[str] = (), registry: CollectorRegistry | None = None, may_change: bool = False
    ) -> None:
        """Adds the counters to the registry, with all their labels, if there are names, or may be some later."""
        kept = list(dict.fromkeys(names))
        self._labels: dict[str, str] = {}
        self._counters = [
            Counter(name, text, ["adapter"], registry=registry) for name, text in COUNTERS.items() if kept or may_change
        ]
        self.note_names(kept)

    def note_names(self, names: Iterable[str]) -> None:
        """From now on there are adapters of these names. A name keeps its counts as long as it is there."""
        kept = list(dict.fromkeys(names))
        staying = [name for name, label in self._labels.items() if label != OTHER and name in kept]
        for name in [name for name, label in self._labels.items() if label != OTHER and name not in kept]:
            for counter in self._counters:
                counter.remove(name)
        shown = [*staying, *(name for name in kept if name not in staying and name != OTHER)][:MAX_NAMES]
        self._labels = {name: name if name in shown else OTHER for name in kept}
        for counter in self._counters:
            for label in dict.fromkeys(self._labels.values()):
                counter.labels(adapter=label)

    def count_text(self, name: str, prompt_tokens: int, output_tokens: int) -> None:
        """`name`: that of the text's adapter; "": none."""
        # A text may end after its adapter's name.
        if name and (label := self._labels.get(name, OTHER)):
            for counter, count in zip(self._counters, (1, prompt_tokens, output_tokens), strict=bool(self._counters)):
                counter.labels(adapter=label).inc(count)
