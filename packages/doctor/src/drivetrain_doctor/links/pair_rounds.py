"""The pairs of ranks that are measured, in rounds of pairs at the same time."""

Pair = tuple[int, int]


def pair_rounds(count: int, *, most_rounds: int, at_once: bool = True) -> tuple[tuple[Pair, ...], ...]:
    """Return rounds of pairs, lower rank first; within a round no rank is in two pairs.

    With an even number of ranks, `count - 1` rounds hold every pair once (the circle method of tournaments).

    Args:
        count: The number of ranks.
        most_rounds: If there are more rounds, so many are taken; of rounds at once, such that are spread over all.
        at_once: Whether the pairs of a round are measured at the same time; else each is a round of its own, as for
            ranks of one host, which share its memory and cores.
    """
    places = count + count % 2  # with an odd number, who meets the last place pauses
    num_rounds = places - 1 if count > 1 else 0
    numbers = range(num_rounds)
    if at_once and num_rounds > most_rounds:
        numbers = [index * num_rounds // most_rounds for index in range(most_rounds)]
    rounds = [_round(number, places, count) for number in numbers]
    if at_once:
        return tuple(rounds)
    return tuple((pair,) for pairs in rounds for pair in pairs)[:most_rounds]


def _round(number: int, places: int, count: int) -> tuple[Pair, ...]:
    turning = places - 1
    pairs = [(number, turning)]
    pairs += [((number + step) % turning, (number - step) % turning) for step in range(1, places // 2)]
    return tuple(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < count))
