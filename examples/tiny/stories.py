"""Small stories: who, where, a wish or a trouble, what was tried, how it ended."""

from __future__ import annotations

import random

from .grammar import article, expand, paragraphs, sentence

GIRLS = ("Mia", "Anna", "Lily", "Rosa", "Clara", "Nora", "Ida", "Emma", "Zoe", "Ruth", "Maya", "Elsa", "Vera", "Tess")
BOYS = ("Tom", "Ben", "Leo", "Max", "Oscar", "Paul", "Finn", "Hugo", "Sam", "Noah", "Otto", "Theo", "Emil", "Karl")
PETS = ("Pip", "Rusty", "Moss", "Bramble", "Button", "Pepper", "Hazel", "Tuck", "Olive", "Dot", "Biscuit", "Clover")
ANIMALS = ("fox", "rabbit", "mouse", "bear", "hedgehog", "squirrel", "badger", "otter", "cat", "dog", "goat", "duck",
           "owl", "frog", "beaver", "mole")
MOODS = ("curious", "shy", "brave", "quiet", "cheerful", "clever", "careful", "stubborn", "gentle", "busy", "dreamy")
HOMES = ("in a small house by the river", "at the edge of a dark forest", "in a village between two hills",
         "on a farm near the sea", "above a bakery in the old town", "beside a mill with a creaking wheel",
         "in a valley full of apple trees", "near a lighthouse on the coast", "at the end of a long, dusty road",
         "under the roots of an old oak", "on the top of a windy hill", "next to a pond with green reeds")
PLACES = ("river", "forest", "market", "old bridge", "hill", "lake", "garden", "mill", "beach", "meadow", "harbour",
          "school")
THINGS = ("key", "red scarf", "silver bell", "wooden boat", "blue button", "map", "lantern", "small drum", "kite",
          "book of songs", "brass compass", "yellow hat", "green marble", "basket", "glass bead", "whistle", "coin")
FOODS = ("apple", "loaf of bread", "plum cake", "bowl of soup", "piece of cheese", "pear", "honey cake", "carrot",
         "cherry pie", "bag of nuts")
WEATHER = ("The sun was «warm|bright» and the air smelled of «grass|hay|flowers».",
           "A «cold|soft|strong» wind blew from the «north|sea|hills».",
           "It had rained all night, and the paths were «wet|muddy».", "There was fog over the fields.",
           "Snow lay on the roofs, and everything was still.", "The sky was clear, without a single cloud.")
MANNERS = ("$name was $mood and «never|seldom» alone.", "$name was «always|often» $mood.", "", "")
MORALS = ("From that day on, $name knew that «asking for help is no shame|a friend is worth more than a treasure».",
          "And that is how $name learned to «wait|listen|share|trust a friend|try once more».",
          "«That night|In the evening» $name slept «well|deeply», and the «moon|stars» shone over the roof.",
          "«Years later|Even now» people in the village «tell|remember» this story.",
          "«It was a good day|It had been a long day», and nobody wanted it to end.",
          "$name never forgot it.", "After that, the two of them were friends.", "")

PLOTS = paragraphs("plots.txt")
OPENINGS = ("Once upon a time there was $who", "There once was $who", "Long ago there was $who",
            "Not far from here, there was $who")
TOPICS = ("{kind}", "{kind} and {an_animal}", "{name} and the {place}", "{a_mood} {being}", "{a_thing}")
REQUESTS = ("Tell me a story about $topic.", "«Please write|Write» a «short|small» story about $topic.",
            "Can you tell me a «short |»story about $topic?", "I would like to hear a story about $topic.",
            "Make up a story «with|about» $topic.")


def story(rng: random.Random) -> tuple[str, str]:
    """A request and the story that answers it."""
    words = cast(rng)
    plot = rng.choice(PLOTS)
    opening = expand(rng.choice(OPENINGS), rng, words)
    first = f"{opening} who lived {rng.choice(HOMES)}."
    second = expand(rng.choice(MANNERS), rng, words)
    weather = expand(rng.choice((*WEATHER, "", "", "")), rng)
    body = " ".join(expand(plot, rng, words).split())
    moral = expand(rng.choice(MORALS), rng, words)
    text = _joined(rng, [" ".join(filter(None, (first, second, weather))), body, moral])
    topic = rng.choice(TOPICS).format_map(words)
    return expand(rng.choice(REQUESTS), rng, {"topic": topic}), text


def cast(rng: random.Random) -> dict[str, str]:
    """The words of one story: they stay the same from its beginning to its end."""
    girl = rng.random() < 0.5
    animal, friend_animal = rng.sample(ANIMALS, 2)
    pet, friend = rng.sample(PETS, 2)
    mood = rng.choice(MOODS)
    if rng.random() < 0.3:
        name, being = pet, animal
    else:
        name, being = rng.choice(GIRLS if girl else BOYS), "girl" if girl else "boy"
    who = expand(f"{article(mood)} {being} «named|called» {name}", rng)
    he, his, him = ("she", "her", "her") if girl else ("he", "his", "him")
    place, thing, food = rng.choice(PLACES), rng.choice(THINGS), rng.choice(FOODS)
    return {"name": name, "being": being, "kind": article(being), "who": who, "mood": mood, "a_mood": article(mood),
            "he": he, "He": sentence(he), "his": his, "him": him, "himself": f"{him}self", "friend": friend,
            "animal": friend_animal, "an_animal": article(friend_animal), "place": place, "thing": thing,
            "a_thing": article(thing), "food": food}


def _joined(rng: random.Random, parts: list[str]) -> str:
    return rng.choice((" ", "\n\n")).join(part.strip() for part in parts if part.strip())
