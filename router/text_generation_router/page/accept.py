"""The header `Accept`: whether a client wants HTML."""

HTML = "text/html"


def prefers_html(accept: str) -> bool:
    """Whether HTML has the highest weight of all types, and is the first with this weight: as browsers ask for pages.
    Probes and HTTP libraries send `*/*`, other types or nothing."""
    weights: dict[str, float] = {}
    for item in accept.lower().split(","):
        media_type, *parameters = (part.strip() for part in item.split(";"))
        weights.setdefault(media_type, _weight(parameters))
    highest = max(weights.values())
    return highest > 0 and next(name for name, weight in weights.items() if weight == highest) == HTML


def _weight(parameters: list[str]) -> float:
    """1 without a weight; 0 for one that is not a number between 0 and 1."""
    given = next((part.removeprefix("q=") for part in parameters if part.startswith("q=")), "1")
    try:
        weight = float(given)
    except ValueError:
        return 0.0
    return weight if 0 <= weight <= 1 else 0.0
