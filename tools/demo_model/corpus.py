"""Makes the demo model's training texts from a seed: short texts and conversations. Uses the standard library only.

Every text is built from word lists and sentence patterns of lexicon.py. A text belongs to one of two splits, decided by
a hash of its content: names, pairs of numbers and (hero, thing, place) plots of the "held-out" split never occur in the
"train" split, so that `evaluate.py` asks only about content that training did not contain.
"""

import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from demo_model.lexicon import (
    ANIMALS,
    ARCS,
    COLOURS,
    DAYS,
    EMOJI,
    ENDS,
    FACT_KINDS,
    FOODS,
    FRUITS,
    HOBBIES,
    HOMES,
    JOBS,
    LISTS,
    MONTHS,
    MORALS,
    OPPOSITES,
    PLACES,
    SIZES,
    SMALL_TALK,
    STARTS,
    THINGS,
    TIMES,
    TOWN_ENDS,
    TRAITS,
    WEATHER,
)

Turn = tuple[str, str]  # (role, content) of a message


@dataclass(frozen=True, slots=True)
class World:
    """Draws words, numbers and names for the texts of one split."""

    rng: random.Random
    held_out: bool
    mix: tuple[int, ...]  # relative frequency of each of KINDS

    def allowed(self, *key: object) -> bool:
        return (zlib.crc32(repr(key).encode()) % 8 == 0) == self.held_out

    def pick(self, words: list[str]) -> str:
        return words[self.rng.randrange(len(words))]

    def name(self, ends: list[str] = ENDS) -> str:
        while True:
            name = self.pick(STARTS) + self.pick(ends)
            if self.allowed("name", name):
                return name

    def names(self, count: int) -> list[str]:
        found: list[str] = []
        while len(found) < count:
            name = self.name()
            if all(name[:2] != other[:2] for other in found):
                found.append(name)
        return found

    def town(self) -> str:
        return self.name(TOWN_ENDS)

    def pair(self, kind: str, low: int, high: int) -> tuple[int, int]:
        """Two numbers in low..high whose pair belongs to this split."""
        while True:
            a, b = self.rng.randint(low, high), self.rng.randint(low, high)
            if self.allowed(kind, a, b):
                return a, b


# --- stories ---------------------------------------------------------------------------------------------------------


def story(world: World) -> tuple[str, str]:
    """A request for a story (without its verb) and the story."""
    hero, friend = world.names(2)
    while True:
        animal, thing, place = world.pick(ANIMALS), world.pick(THINGS), world.pick(PLACES)
        if world.allowed("plot", animal, thing, place):
            break
    title = world.pick(list(ARCS))
    slots = {
        "h": hero,
        "f": friend,
        "t": thing,
        "p": place,
        "c": world.pick(COLOURS),
        "d": world.pick(FOODS),
        "T": world.pick(TIMES),
    }
    size, trait, friend_animal = world.pick(SIZES), world.pick(TRAITS), world.pick(ANIMALS)
    opening = world.pick(
        [
            f"Once upon a time there was a {size} {animal} named {hero}.",
            f"There once was a {size} {animal} called {hero}.",
            f"{hero} was a {size} and {trait} {animal}.",
        ]
    )
    body = [
        opening,
        world.pick(
            [f"{hero} lived in {world.pick(HOMES)} {place}.", f"The home of {hero} was {world.pick(HOMES)} {place}."]
        ),
        world.pick(
            [
                f"{hero} was {trait} and loved to {world.pick(HOBBIES)}.",
                f"Most of all, {hero} liked to {world.pick(HOBBIES)}.",
            ]
        ),
        world.pick(
            [
                f"The best friend of {hero} was a {friend_animal} named {friend}.",
                f"Next door lived {friend}, a {world.pick(TRAITS)} {friend_animal}.",
            ]
        ),
    ]
    if world.rng.random() < 0.3:
        body.append(f"It was a day on which {world.pick(WEATHER)}.")
    body += [world.pick(list(beat)).format(**slots) for beat in ARCS[title]]
    body.append(world.pick(MORALS).format(**slots))
    cuts = sorted(world.rng.sample(range(4, len(body) - 1), 2))
    paragraphs = [body[: cuts[0]], body[cuts[0] : cuts[1]], body[cuts[1] :]]
    arc = title.format(**slots).replace("a umbrella", "an umbrella")
    about = world.pick(
        [
            f"a {animal} named {hero} who {arc}",
            f"{hero} the {animal}, who {arc}",
            f"a {animal} named {hero}",
            f"a {animal} called {hero} and a {slots['c']} {thing}",
        ]
    )
    text = "\n\n".join(" ".join(paragraph) for paragraph in paragraphs)
    return about, text.replace("a orange", "an orange").replace("a umbrella", "an umbrella").replace(
        "a otter", "an otter"
    ).replace("a owl", "an owl").replace("a old", "an old")


def story_request(world: World) -> Turn:
    about, text = story(world)
    ask = world.pick(
        [
            "Tell me a story about {}.",
            "Write a story about {}.",
            "Please tell a short story about {}.",
            "Write a short story about {}.",
        ]
    )
    return ask.format(about).replace("a otter", "an otter").replace("a owl", "an owl").replace(
        "a orange", "an orange"
    ), text


# --- questions and answers -------------------------------------------------------------------------------------------


def sum_question(world: World, most: int = 99) -> Turn:
    a, b = world.pair("+", 0, most)
    ask = world.pick(
        [
            "What is {a} + {b}?",
            "{a} + {b} = ?",
            "Calculate {a} + {b}.",
            "What is {a} plus {b}?",
            "How much is {a} + {b}?",
            "Add {a} and {b}.",
        ]
    )
    return ask.format(a=a, b=b), f"{a} + {b} = {a + b}"


def difference(world: World, most: int = 99) -> Turn:
    a, b = sorted(world.pair("-", 0, most), reverse=True)
    ask = world.pick(["What is {a} - {b}?", "{a} - {b} = ?", "Calculate {a} - {b}.", "What is {a} minus {b}?"])
    return ask.format(a=a, b=b), f"{a} - {b} = {a - b}"


def product(world: World) -> Turn:
    a, b = (
        world.rng.randint(0, 10),
        world.rng.randint(0, 10),
    )  # all pairs are in the training texts, because the model learns products by heart
    return world.pick(["What is {a} times {b}?", "What is {a} x {b}?"]).format(a=a, b=b), f"{a} x {b} = {a * b}"


def word_problem(world: World) -> Turn:
    name, fruit = world.name(), world.pick(FRUITS)
    if world.rng.random() < 0.5:
        a, b = world.pair("+", 0, 99)
        gets = world.pick(["finds", "buys", "picks", "gets"])
        return (
            f"{name} has {a} {fruit} and {gets} {b} more. How many {fruit} does {name} have now?",
            f"{a} + {b} = {a + b}, so {name} has {a + b} {fruit} now.",
        )
    a, b = sorted(world.pair("-", 0, 99), reverse=True)
    gives = world.pick(["eats", "sells", "loses", "gives away"])
    return (
        f"{name} has {a} {fruit} and {gives} {b} of them. How many {fruit} are left?",
        f"{a} - {b} = {a - b}, so {a - b} {fruit} are left.",
    )


def larger(world: World) -> Turn:
    a, b = world.pair("larger", 0, 99)
    if a == b:
        b = a + 1
    larger = world.rng.random() < 0.5
    word, best = ("larger", max(a, b)) if larger else ("smaller", min(a, b))
    return f"Which number is {word}, {a} or {b}?", f"{best} is {word} than {min(a, b) if larger else max(a, b)}."


def count(world: World) -> Turn:
    start, length = world.pair("count", 3, 60)
    stop = start + 3 + length % 9
    return f"Count from {start} to {stop}.", ", ".join(str(n) for n in range(start, stop + 1))


def next_number(world: World) -> Turn:
    a, _ = world.pair("next", 0, 998)
    if world.rng.random() < 0.5:
        return f"What number comes after {a}?", f"{a + 1} comes after {a}."
    return f"What number comes before {a + 1}?", f"{a} comes before {a + 1}."


def facts(world: World) -> Turn:
    """A passage about one to three people, with a different kind of fact about each, and a question about one of
    them.
    """
    people = world.names(world.rng.randint(1, 3))
    kinds = world.rng.sample(FACT_KINDS, world.rng.randint(2, 4))
    return _ask_about([_fact(world, kind, world.pick(people)) for kind in kinds], world)


def crowded_facts(world: World) -> Turn:
    """A passage with the same kind of fact about each of up to three people. This is harder, because only the name
    tells them apart.
    """
    people = world.names(world.rng.choices([1, 2, 3], [4, 4, 2])[0])
    kinds = world.rng.sample(FACT_KINDS, 2 if len(people) > 1 else 3)
    told = [_fact(world, kind, name) for name in people for kind in kinds]
    world.rng.shuffle(told)
    return _ask_about(told, world)


def _ask_about(told: list[tuple[str, str, str]], world: World) -> Turn:
    _, question, answer = told[world.rng.randrange(len(told))]
    return " ".join(fact for fact, _, _ in told) + " " + question, answer


def _fact(world: World, kind: str, name: str) -> tuple[str, str, str]:
    """(the sentence that states a fact, a question about it, the answer)"""
    if kind == "town":
        town = world.town()
        return (
            world.pick([f"{name} lives in {town}.", f"The home of {name} is in {town}."]),
            f"Where does {name} live?",
            f"{name} lives in {town}.",
        )
    if kind == "age":
        age = world.rng.randint(3, 99)
        return (
            f"{name} is {age} years old.",
            world.pick([f"How old is {name}?", f"What is the age of {name}?"]),
            f"{name} is {age} years old.",
        )
    if kind == "food":
        food = world.pick(FOODS)
        return (
            world.pick([f"{name} likes {food}.", f"{name} likes to eat {food}."]),
            f"What does {name} like?",
            f"{name} likes {food}.",
        )
    if kind == "job":
        job = world.pick(JOBS)
        return (
            f"{name} is a {job}.",
            world.pick([f"What is the job of {name}?", f"What does {name} do?"]),
            f"{name} is a {job}.",
        )
    if kind == "thing":
        thing, colour = world.pick(THINGS), world.pick([c for c in COLOURS if c != "orange"])
        return (
            f"{name} has a {colour} {thing}.",
            world.pick([f"What colour is the {thing} of {name}?", f"What does {name} have?"]),
            f"{name} has a {colour} {thing}.",
        )
    animal = world.pick([a for a in ANIMALS if a[0] not in "aeiou"])
    return f"{name} has a {animal} as a pet.", f"What pet does {name} have?", f"{name} has a {animal} as a pet."


def json_request(world: World) -> Turn:
    name, town, age = world.name(), world.town(), world.rng.randint(3, 99)
    kind = world.rng.randrange(4)
    if kind == 0:
        return f"Write a JSON object for {name}, who is {age} years old and lives in {town}.", json.dumps(
            {"name": name, "age": age, "city": town}
        )
    if kind == 1:
        likes = world.rng.sample(FOODS, world.rng.randint(1, 4))
        return f"Write as JSON: {name} likes {', '.join(likes)}.", json.dumps({"name": name, "likes": likes})
    if kind == 2:
        item, colour, amount = world.pick(THINGS), world.pick(COLOURS), world.rng.randint(1, 99)
        return f"Write a JSON object for an order of {amount} {colour} {item}s by {name}.", json.dumps(
            {"customer": name, "item": item, "colour": colour, "amount": amount}
        )
    others = world.names(world.rng.randint(2, 4))
    return f"Make a JSON list of these names: {', '.join(others)}.", json.dumps(others)


def listing(world: World) -> Turn:
    topic = world.pick(list(LISTS))
    count = world.rng.randint(2, 6)
    items = world.rng.sample(LISTS[topic], count)
    words = ["two", "three", "four", "five", "six"][count - 2]
    ask = world.pick([f"List {words} {topic}.", f"Name {words} {topic}.", f"Give me a list of {words} {topic}."])
    return ask, "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))


def common_fact(world: World) -> Turn:
    kind = world.rng.randrange(5)
    if kind == 0:
        word = world.pick(list(OPPOSITES))
        opposite = OPPOSITES[word]
        if world.rng.random() < 0.5:
            word, opposite = opposite, word
        return f"What is the opposite of {word}?", f"The opposite of {word} is {opposite}."
    if kind == 1:
        i = world.rng.randrange(7)
        return f"What day comes after {DAYS[i]}?", f"{DAYS[(i + 1) % 7]} comes after {DAYS[i]}."
    if kind == 2:
        i = world.rng.randrange(12)
        return f"What month comes after {MONTHS[i]}?", f"{MONTHS[(i + 1) % 12]} comes after {MONTHS[i]}."
    if kind == 3:
        word = world.pick(list(EMOJI))
        return world.pick(
            [f"Show me the emoji for {word}.", f"What is the emoji for {word}?"]
        ), f"{EMOJI[word]} is the emoji for {word}."
    word = world.pick(list(OPPOSITES))
    return f"Say the word {word} three times.", f"{word}, {word}, {word}"


def repeat(world: World) -> Turn:
    """A question that asks to repeat words: the simplest task from which the model learns to copy from earlier text."""
    makers: list[Callable[[], str]] = [
        world.name,
        world.town,
        lambda: world.pick(THINGS),
        lambda: world.pick(ANIMALS),
        lambda: str(world.rng.randint(0, 999)),
    ]
    words = " ".join(makers[world.rng.randrange(len(makers))]() for _ in range(world.rng.randint(2, 6)))
    return world.pick(["Repeat: {}", "Say this: {}", "Repeat these words: {}"]).format(words), words


def unknown(world: World) -> Turn:
    """Questions about facts that the model was never taught. The right answer says that it does not know."""
    thing = world.pick(
        [
            world.name(TOWN_ENDS),
            world.name(),
            world.name().lower() + " " + world.name().lower(),
            f"{world.pick(TRAITS)} {world.name().lower()}",
            f"{world.name()} {world.name()}",
        ]
    )
    ask = world.pick(
        ["What is {}?", "Who is {}?", "Explain {}.", "Tell me about {}.", "How does {} work?", "Why is {} important?"]
    )
    return ask.format(thing), f"I do not know anything about {thing}. I am only a small demo model."


def small_talk(world: World) -> Turn:
    return SMALL_TALK[world.rng.randrange(len(SMALL_TALK))]


# The kinds of single questions, and how often each is asked in the first and in the second part of the training. The
# second mix has more of the questions that take longest to learn (borrowing in differences), and more passages in which
# each person has another kind of fact.
KINDS = (
    sum_question, difference, product, word_problem, larger, count, next_number, facts, crowded_facts, repeat,
    json_request, listing, common_fact, unknown, small_talk, story_request,
)  # fmt: skip
FIRST_MIX = (24, 10, 3, 9, 6, 5, 5, 0, 25, 8, 9, 3, 5, 4, 2, 2)
SECOND_MIX = (18, 26, 3, 10, 8, 3, 3, 18, 4, 8, 8, 3, 4, 4, 2, 4)
THIRD_MIX = (40, 30, 5, 12, 6, 4, 4, 16, 6, 10, 6, 3, 4, 4, 3, 3)
# The kinds that `evaluate.py` counts as "questions of the kinds it was taught": each has one right answer.
ANSWERABLE = [difference, word_problem, larger, count, next_number, facts, crowded_facts, repeat]


def question(world: World) -> Turn:
    return world.rng.choices(KINDS, world.mix)[0](world)


def dialogue(world: World, turns: int) -> list[Turn]:
    """Alternating user and assistant messages, sometimes with a system message, or with a name that a later question
    asks for.
    """
    messages: list[Turn] = []
    if world.rng.random() < 0.25:
        messages.append(
            ("system", world.pick(["You are a helpful assistant.", "You are a friendly assistant.", "Answer briefly."]))
        )
    remembered = None
    for _ in range(turns):
        draw = world.rng.random()
        if turns > 1 and remembered is None and draw < 0.15:
            remembered = world.name()
            ask, answer = f"My name is {remembered}.", f"Nice to meet you, {remembered}!"
        elif remembered is not None and draw < 0.15:
            ask, answer = world.pick(["What is my name?", "Do you remember my name?"]), f"Your name is {remembered}."
        else:
            ask, answer = question(world)
        messages += [("user", ask), ("assistant", answer)]
    return messages


def render(messages: list[Turn]) -> str:
    """The messages in the chat format, as chat_template.jinja writes it (without the begin token, which the tokenizer
    adds).
    """
    return "".join(f"<|{role}|>{content}</s>" for role, content in messages)


def document(world: World) -> str:
    draw = world.rng.random()
    if draw < 0.06:
        return story(world)[1] + "</s>"
    if draw < 0.13:
        return (
            "\n".join(
                f"Question: {q}\nAnswer: {a}" for q, a in (question(world) for _ in range(world.rng.randint(1, 4)))
            )
            + "</s>"
        )
    if draw < 0.15:
        return "\n".join(sum_question(world)[1] for _ in range(world.rng.randint(3, 12))) + "</s>"
    if draw < 0.60:
        return render(dialogue(world, 1))
    return render(dialogue(world, world.rng.randint(2, 12)))


def documents(seed: int, mix: tuple[int, ...] = SECOND_MIX, held_out: bool = False) -> Iterator[str]:
    world = World(random.Random(seed), held_out, mix)
    while True:
        yield document(world)
