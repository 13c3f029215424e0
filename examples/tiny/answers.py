"""Questions and answers about everyday things, short instructions and small talk."""

from __future__ import annotations

import random

from .grammar import article, blocks, expand, listing, sentence

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo",
            "Norway": "Oslo", "Sweden": "Stockholm", "Greece": "Athens", "Egypt": "Cairo", "Peru": "Lima",
            "Austria": "Vienna", "Poland": "Warsaw", "Portugal": "Lisbon", "Ireland": "Dublin", "Kenya": "Nairobi",
            "Cuba": "Havana", "China": "Beijing", "Hungary": "Budapest", "Finland": "Helsinki", "Denmark": "Copenhagen"}
OPPOSITES = {"hot": "cold", "big": "small", "fast": "slow", "old": "young", "early": "late", "full": "empty",
             "wet": "dry", "hard": "soft", "light": "dark", "high": "low", "long": "short", "loud": "quiet",
             "rich": "poor", "open": "closed", "strong": "weak", "deep": "shallow", "near": "far", "happy": "sad",
             "clean": "dirty"}
GROUPS = {"fruit": ("apples", "pears", "plums", "cherries", "grapes", "oranges", "bananas"),
          "vegetable": ("carrots", "onions", "peas", "beans", "cabbages", "leeks", "potatoes"),
          "colour": ("red", "blue", "green", "yellow", "brown", "purple", "orange", "white"),
          "tool": ("a hammer", "a saw", "a screwdriver", "a pair of pliers", "a file", "a drill"),
          "animal": ("foxes", "bears", "owls", "otters", "horses", "frogs", "whales", "mice"),
          "instrument": ("the violin", "the flute", "the piano", "the drum", "the trumpet", "the guitar"),
          "metal": ("iron", "copper", "gold", "silver", "tin", "lead", "zinc"),
          "planet": ("Mercury", "Venus", "Mars", "Jupiter", "Saturn", "Neptune", "Uranus")}
COLOURS = {"snow": "white", "grass": "green", "the sky on a clear day": "blue", "a ripe tomato": "red", "coal": "black",
           "a lemon": "yellow", "milk": "white", "chocolate": "brown", "a carrot": "orange", "blood": "red"}
PLACES = {"bakery": "bread and cakes are made", "library": "books are kept and lent", "school": "children learn",
          "hospital": "sick people are cared for", "harbour": "ships can lie safely",
          "market": "people buy and sell things", "theatre": "plays are shown",
          "farm": "animals are kept and plants are grown", "station": "trains stop",
          "workshop": "things are made and repaired", "museum": "old and rare things are shown",
          "kitchen": "meals are cooked"}
MAKERS = {"bread": "a baker", "shoes": "a shoemaker", "houses": "a builder", "clothes": "a tailor",
          "chairs": "a carpenter", "songs": "a composer", "books": "a writer", "pots": "a potter",
          "programs": "a programmer", "maps": "a mapmaker"}
REASONS = {question: " ".join(reply) for question, *reply in blocks("reasons.txt")}
STEPS = {task: steps for task, *steps in blocks("steps.txt")}
TALK = [(said, " ".join(reply)) for said, *reply in blocks("talk.txt")]
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
          "December")

def answer(rng: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    return rng.choice((_capital, _opposite, _group, _colour, _place, _maker, _reason, _steps, _steps, _calendar, _talk,
                       _sorting, _choice, _letters))(rng)


def _capital(rng: random.Random) -> tuple[str, str]:
    country, city = rng.choice(list(CAPITALS.items()))
    if rng.random() < 0.3:
        question = expand(f"«In which country is {city}?|Where is {city}?»", rng)
        return question, f"{city} is in {country}. It is the capital."
    capital = f"the capital of {country}"
    question = expand(f"«What is {capital}?|Which city is {capital}?|Tell me {capital}.»", rng)
    return question, expand(f"«The capital of {country} is {city}.|It is {city}.|{city} is {capital}.»", rng)


def _opposite(rng: random.Random) -> tuple[str, str]:
    pair = list(rng.choice(list(OPPOSITES.items())))
    rng.shuffle(pair)
    one, other = pair
    return (expand(f'«What is the opposite of "{one}"?|Which word is the opposite of {one}?»', rng),
            expand(f'«The opposite of "{one}" is "{other}".|It is "{other}": something cannot be {one} and {other} at '
                   "once.»", rng))


def _group(rng: random.Random) -> tuple[str, str]:
    kind = rng.choice(list(GROUPS))
    count = rng.randint(2, 5)
    things = listing(rng.sample(GROUPS[kind], count))
    number = ("two", "three", "four", "five")[count - 2]
    reply = f"«{sentence(things)}.|{number.capitalize()} {kind}s are {things}.|Here are {number}: {things}.»"
    return expand(f"«Name|Tell me|List|Give me» {number} {kind}s.", rng), expand(reply, rng)


def _colour(rng: random.Random) -> tuple[str, str]:
    thing, colour = rng.choice(list(COLOURS.items()))
    return f"What colour is {thing}?", expand(f"«{sentence(thing)} is {colour}.|It is {colour}.»", rng)


def _place(rng: random.Random) -> tuple[str, str]:
    place, what = rng.choice(list(PLACES.items()))
    a_place = article(place)
    return (expand(f"«What is {a_place}?|Explain what {a_place} is.|What do people do in {a_place}?»", rng),
            f"{sentence(a_place)} is a place where {what}.")


def _maker(rng: random.Random) -> tuple[str, str]:
    thing, maker = rng.choice(list(MAKERS.items()))
    if rng.random() < 0.5:
        return f"Who makes {thing}?", f"{sentence(maker)} makes {thing}."
    return f"What does {maker} do?", f"{sentence(maker)} makes {thing}."


def _reason(rng: random.Random) -> tuple[str, str]:
    question, reply = rng.choice(list(REASONS.items()))
    if rng.random() < 0.4:
        question = expand(f"«Can you tell me|Please explain|Do you know»: {question[0].lower()}{question[1:]}", rng)
    return question, reply


def _steps(rng: random.Random) -> tuple[str, str]:
    task, steps = rng.choice(list(STEPS.items()))
    question = expand(f"«How do I {task}?|How can I {task}?|Explain how to {task}.|What are the steps to {task}?»", rng)
    style = rng.randrange(3)
    if style == 0:
        return question, "\n".join(f"{i}. {sentence(step)}." for i, step in enumerate(steps, 1))
    if style == 1:
        middle = [expand(f"«Then|After that|Next», {step}.", rng) for step in steps[1:-1]]
        return question, " ".join([f"First, {steps[0]}.", *middle, expand(f"«Finally|At the end», {steps[-1]}.", rng)])
    return question, f"You need {len(steps)} steps: {', '.join(steps[:-1])}, and {steps[-1]}."


def _calendar(rng: random.Random) -> tuple[str, str]:
    names, unit = rng.choice(((DAYS, "day"), (MONTHS, "month")))
    at = rng.randrange(len(names))
    if rng.random() < 0.5:
        return (f"Which {unit} comes after {names[at]}?",
                f"After {names[at]} comes {names[(at + 1) % len(names)]}.")
    return f"Which {unit} comes before {names[at]}?", f"Before {names[at]} comes {names[at - 1]}."


def _talk(rng: random.Random) -> tuple[str, str]:
    question, reply = rng.choice(TALK)[:2]
    return expand(question, rng), expand(reply, rng)


def _sorting(rng: random.Random) -> tuple[str, str]:
    numbers = rng.sample(range(1, 60), rng.randint(3, 5))
    largest = rng.random() < 0.3
    if largest:
        return f"Which is the largest of {listing([str(n) for n in numbers])}?", f"The largest is {max(numbers)}."
    ordered = ", ".join(map(str, sorted(numbers)))
    return (expand(f"«Sort these numbers|Put these numbers in order»: {', '.join(map(str, numbers))}.", rng),
            expand(f"«In order they are {ordered}.|{ordered}.|From the smallest to the largest: {ordered}.»", rng))


def _choice(rng: random.Random) -> tuple[str, str]:
    order = ("an ant", "a mouse", "a cat", "a sheep", "a horse", "an elephant", "a whale")
    a, b = rng.sample(range(len(order)), 2)
    bigger = rng.random() < 0.5
    word = "bigger" if bigger else "smaller"
    chosen, other = (order[max(a, b)], order[min(a, b)]) if bigger else (order[min(a, b)], order[max(a, b)])
    return (f"Which is {word}, {order[a]} or {order[b]}?", f"{sentence(chosen)} is {word} than {other}.")


def _letters(rng: random.Random) -> tuple[str, str]:
    word = rng.choice([*OPPOSITES, *OPPOSITES.values(), *PLACES])
    style = rng.randrange(3)
    if style == 0:
        return f'How is "{word}" spelled?', f"It is spelled {'-'.join(word)}."
    if style == 1:
        return (expand(f'«How many letters are in "{word}"?|How long is the word "{word}"?»', rng),
                f"{', '.join(word)}: \"{word}\" has {len(word)} letters.")
    return f'What is the first letter of "{word}"?', f'The first letter of "{word}" is {word[0]}.'
