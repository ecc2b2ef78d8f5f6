"""The official Prometheus parser, as the oracle of our scanner on the pages of real servers."""

from prometheus_client.parser import text_string_to_metric_families


def found(samples, names):
    """Samples of these names as comparable tuples, in any order: NaN equals NaN."""
    return sorted(
        (one.name, sorted(one.labels.items()), repr(float(one.value)))
        for one in samples
        if one.name in names
    )


def official(page):
    """Every sample of a page."""
    families = text_string_to_metric_families(page.decode())
    return [one for family in families for one in family.samples]


def agrees(scanner, page):
    """Whether the scanner finds on a page what the official parser finds, and anything at all."""
    every = official(page)
    ours = scanner.scan(page)
    names = {one.name for one in every if scanner.scan(f"{one.name} 1\n".encode())}
    return bool(ours) and found(ours, names) == found(every, names)
