"""Small sums, bare or told as a story, with the working shown."""

from __future__ import annotations

import random

from .grammar import expand
from .stories import BOYS, GIRLS

THINGS = ("apples", "marbles", "books", "coins", "pencils", "shells", "eggs", "stamps", "nuts", "cards", "buttons")


def sum_(rng: random.Random) -> tuple[str, str]:
    """A sum and its answer."""
    return rng.choice((_plus, _minus, _times, _divide, _gain, _lose, _groups, _difference, _two_steps))(rng)


def _ask(rng: random.Random, left: str) -> str:
    return expand(f"«What is {left}?|How much is {left}?|{left} = ?|Please work out {left}.»", rng)


def _say(rng: random.Random, left: str, result: int) -> str:
    return expand(f"«{left} = {result}.|{left} is {result}.|The answer is {result}, because {left} = {result}.»", rng)


def _plus(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    left = f"{a} + {b}"
    if a >= 10 and b >= 10 and rng.random() < 0.5:  # with the working
        tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
        working = (f"The tens are {a // 10 * 10} + {b // 10 * 10} = {tens}. The ones are {a % 10} + {b % 10} = {ones}. "
                   f"Together, {tens} + {ones} = {a + b}.")
        return _ask(rng, left), working
    return _ask(rng, left), _say(rng, left, a + b)


def _minus(rng: random.Random) -> tuple[str, str]:
    b, a = sorted((rng.randint(1, 60), rng.randint(1, 60)))
    return _ask(rng, f"{a} - {b}"), _say(rng, f"{a} - {b}", a - b)


def _times(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    left = expand(f"{a} «*|times» {b}", rng)
    if a <= 4 and rng.random() < 0.4:
        return _ask(rng, left), f"{left} is {' + '.join([str(b)] * a)} = {a * b}."
    return _ask(rng, left), _say(rng, left, a * b)


def _divide(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(2, 10), rng.randint(2, 10)
    return _ask(rng, f"{a * b} / {b}"), f"{a * b} / {b} = {a}, because {a} * {b} = {a * b}."


def _person(rng: random.Random) -> tuple[str, str]:
    return (rng.choice(GIRLS), "she") if rng.random() < 0.5 else (rng.choice(BOYS), "he")


def _gain(rng: random.Random) -> tuple[str, str]:
    name, he = _person(rng)
    thing, a, b = rng.choice(THINGS), rng.randint(2, 30), rng.randint(2, 20)
    question = expand(f"{name} has {a} {thing} and «finds|gets|buys» {b} more. How many {thing} does {he} have "
                      "«now|in all»?", rng)
    return question, f"{name} starts with {a} {thing} and adds {b}. {a} + {b} = {a + b}. So {name} has {a + b} {thing}."


def _lose(rng: random.Random) -> tuple[str, str]:
    name, he = _person(rng)
    thing, a = rng.choice(THINGS), rng.randint(5, 40)
    b = rng.randint(1, a - 1)
    question = expand(f"{name} has {a} {thing} and «gives away|loses|sells» {b} of them. How many are left?", rng)
    left = a - b
    return question, f"{name} starts with {a} {thing} and {b} go away. {a} - {b} = {left}. So {left} {thing} are left."


def _groups(rng: random.Random) -> tuple[str, str]:
    thing, a, b = rng.choice(THINGS), rng.randint(2, 9), rng.randint(2, 12)
    question = expand(f"There are {a} «boxes|bags|baskets» with {b} {thing} in each. How many {thing} are there?", rng)
    return question, f"Each of the {a} holds {b} {thing}. {a} * {b} = {a * b}. There are {a * b} {thing}."


def _difference(rng: random.Random) -> tuple[str, str]:
    (one, _), (other, _) = _person(rng), _person(rng)
    if one == other:
        return _difference(rng)
    thing = rng.choice(THINGS)
    b, a = sorted(rng.sample(range(1, 50), 2))
    question = f"{one} has {a} {thing} and {other} has {b}. How many more does {one} have?"
    return question, f"{a} - {b} = {a - b}. {one} has {a - b} more {thing} than {other}."


def _two_steps(rng: random.Random) -> tuple[str, str]:
    name, he = _person(rng)
    thing, a, b = rng.choice(THINGS), rng.randint(5, 20), rng.randint(2, 15)
    c = rng.randint(1, a + b - 1)
    question = (f"{name} has {a} {thing}. First {he} gets {b} more, then {he} gives {c} to a friend. "
                f"How many {thing} does {he} have at the end?")
    return question, (f"First step: {a} + {b} = {a + b}. Second step: {a + b} - {c} = {a + b - c}. "
                      f"At the end {name} has {a + b - c} {thing}.")
