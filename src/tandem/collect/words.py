"""Fresh random text for probes: short common words, about one token each in most vocabularies.

For: a prompt that no prefix cache has seen, so that KV really moves. Not for: secrets.
"""

import secrets

WORDS = tuple(
    """
    able acid aged also area army away baby back ball band bank base bath bear beat been beer bell
    belt best bill bird blow blue boat body bomb bond bone book boom born boss both bowl bulk burn
    bush busy call calm came camp card care case cash cast cell chat chip city club coal coat code
    cold come cook cool cope copy core cost crew crop dark data date dawn days dead deal dean dear
    debt deep deny desk dial diet disc disk does done door dose down draw drew drop drug dual duke
    dust duty each earn ease east easy edge else even ever evil exit face fact fail fair fall farm
    fast fate fear feed feel feet fell felt file fill film find fine fire firm fish five flat flow
    food foot ford form fort four free from fuel full fund gain game gate gave gear gene gift girl
    give glad goal goes gold golf gone good gray grew grey grow gulf hair half hall hand hang hard
    harm hate have head hear heat held hell help here hero high hill hire hold hole holy home hope
    """.split()  # noqa: SIM905 - words read best as words
)


def fresh_text(words: int) -> str:
    """That many random words; two texts almost surely differ from the first word on."""
    return " ".join(secrets.choice(WORDS) for _ in range(words))
