"""The kinds of tools that the demo model learns to call: their names, parameters and descriptions, and what users ask
of them. Every text comes from the lists here and in lexicon.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

from demo_model.corpus import World
from demo_model.lexicon import CITIES, COLOURS, DAYS, FOODS, FRUITS, PEOPLE, PLACES, SKIES, THINGS


@dataclass(frozen=True, slots=True)
class Errand:
    """What a user asks of a tool: the question, the value of each of the tool's parameters, the tool's result and its
    name in JSON, and the answer in words after the result.
    """

    question: str
    values: tuple[str | int, ...]
    result: object
    field: str
    answer: str


@dataclass(frozen=True, slots=True)
class ToolKind:
    """`names`, `parameters` and `descriptions` are alternatives: a tool has one of each. A type stands for each value:
    "string", "integer", or the texts that are allowed, separated by "|".
    """

    names: list[str]
    parameters: list[tuple[str, ...]]
    types: tuple[str, ...]
    descriptions: list[str]
    errand: Callable[[World], Errand]
    is_arithmetic: bool = False


OPENINGS = ["Hello!", "Hi!", "Good morning!", "Please help me.", "One more thing."]
ENDINGS = ["Thank you.", "Thanks.", "Please.", "Can you do that?"]


def _ask(world: World, asks: list[str]) -> str:
    """One of `asks`, now and then with a sentence before or after it. Such a phrasing belongs to one split, so that no
    held-out question has been in a training text.
    """
    while True:
        opening = world.pick(OPENINGS) + " " if world.rng.random() < 0.25 else ""
        ending = " " + world.pick(ENDINGS) if world.rng.random() < 0.25 else ""
        phrasing = opening + world.pick(asks) + ending
        if world.allowed("phrasing", phrasing):
            return phrasing


def _person(world: World) -> str:
    return world.pick(PEOPLE) if world.rng.random() < 0.5 else world.name()


def _place(world: World) -> str:
    return world.pick(CITIES) if world.rng.random() < 0.5 else world.town()


def _number(world: World, kind: str, digits: int) -> int:
    """A number of 1 to `digits` digits; each length is equally frequent."""
    while True:
        number = world.rng.randrange(1, 10 ** world.rng.randint(1, digits))
        if world.allowed(kind, number):
            return number


def _sentence(world: World) -> str:
    """A sentence without a full stop, for messages and notes."""
    while True:
        text = world.pick(
            [
                f"I am at {world.pick(PLACES)}",
                f"I found the {world.pick(COLOURS)} {world.pick(THINGS)}",
                f"we have {world.pick(FOODS)} today",
                f"I like {world.pick(FOODS)}",
                f"the {world.pick(THINGS)} is {world.pick(COLOURS)}",
                f"come to {world.pick(PLACES)} on {world.pick(DAYS)}",
                f"I will be home on {world.pick(DAYS)}",
                f"please bring the {world.pick(THINGS)}",
            ]
        )
        if world.allowed("sentence", text):
            return text


def _weather(world: World) -> Errand:
    town, sky = _place(world), world.pick(SKIES)
    asks = [
        "What is the weather in {}?",
        "What is the weather like in {}?",
        "What's the weather in {}?",
        "How is the weather in {} today?",
        "What is the weather like in {} today?",
        "Tell me the weather in {}.",
        "Is it raining in {}?",
        "Is it cold in {}?",
    ]
    return Errand(_ask(world, asks).format(town), (town,), sky, "weather", f"It is {sky} in {town}.")


def _arithmetic(sign: str, asks: list[str], compute: Callable[[int, int], int]) -> Callable[[World], Errand]:
    asks = [*asks, f"What is {{a}} {sign} {{b}}?", f"Calculate {{a}} {sign} {{b}}.", f"How much is {{a}} {sign} {{b}}?"]

    def errand(world: World) -> Errand:
        while True:
            a, b = (world.rng.randrange(10 ** world.rng.randint(1, 4)) for _ in range(2))
            if world.allowed("tool " + sign, a, b):
                break
        result = compute(a, b)
        return Errand(_ask(world, asks).format(a=a, b=b), (a, b), result, "result", f"{a} {sign} {b} = {result}")

    return errand


def _timer(world: World) -> Errand:
    minutes = _number(world, "minutes", digits=3)
    asks = [
        "Set a timer for {} minutes.",
        "Set a timer of {} minutes.",
        "Start a timer for {} minutes.",
        "Please start a timer of {} minutes.",
        "Wake me in {} minutes.",
    ]
    answer = f"The timer is set for {minutes} minutes."
    return Errand(_ask(world, asks).format(minutes), (minutes,), "ok", "status", answer)


def _find(world: World) -> Errand:
    while True:
        thing = f"{world.pick(COLOURS)} {world.pick(THINGS)}" if world.rng.random() < 0.5 else world.pick(THINGS)
        if " " not in thing or world.allowed("find", thing):
            break
    place = world.pick(PLACES)
    asks = ["Where is my {}?", "Find my {}.", "Where did I leave my {}?", "I lost my {}. Where is it?"]
    return Errand(_ask(world, asks).format(thing), (thing,), place, "place", f"Your {thing} is at {place}.")


def _message(world: World) -> Errand:
    name, text = _person(world), _sentence(world)
    asks = ["Send a message to {}: {}.", "Write to {}: {}.", "Send this to {}: {}.", "Tell {} that {}."]
    return Errand(_ask(world, asks).format(name, text), (name, text), "sent", "status", f"I sent it to {name}.")


def _age(world: World) -> Errand:
    name, age = _person(world), world.rng.randint(3, 99)
    asks = ["How old is {}?", "What is the age of {}?", "Tell me the age of {}.", "Tell me how old {} is."]
    return Errand(_ask(world, asks).format(name), (name,), age, "age", f"{name} is {age} years old.")


def _home(world: World) -> Errand:
    name, town = _person(world), _place(world)
    asks = ["Where does {} live?", "In which town does {} live?", "Tell me where {} lives.", "Where is the home of {}?"]
    return Errand(_ask(world, asks).format(name), (name,), town, "town", f"{name} lives in {town}.")


def _buy(world: World) -> Errand:
    fruit, amount = world.pick(FRUITS), _number(world, "amount", digits=2)
    asks = ["Buy {} {}.", "Order {} {}.", "Please buy {} {}.", "Order {} {} for me.", "I need {} {}."]
    answer = f"I bought {amount} {fruit}."
    return Errand(_ask(world, asks).format(amount, fruit), (fruit, amount), "ok", "status", answer)


def _lamp(world: World) -> Errand:
    state = world.pick(["on", "off"])
    asks = ["Switch the lamp {}.", "Switch {} the light.", "Turn {} the lamp.", "Turn the light {}."]
    return Errand(_ask(world, asks).format(state), (state,), "ok", "status", f"The lamp is {state}.")


def _meeting(world: World) -> Errand:
    name, day = _person(world), world.pick(DAYS)
    asks = [
        "Book a meeting with {} on {}.",
        "I want to meet {} on {}.",
        "Plan a visit of {} on {}.",
        "Plan a meeting with {} on {}.",
    ]
    return Errand(_ask(world, asks).format(name, day), (name, day), "ok", "status", f"You will meet {name} on {day}.")


def _note(world: World) -> Errand:
    text = _sentence(world)
    asks = ["Write down: {}.", "Remember this: {}.", "Make a note: {}.", "Note that {}."]
    return Errand(_ask(world, asks).format(text), (text,), "ok", "status", "I wrote it down.")


def _clock(world: World) -> Errand:
    time = f"{world.rng.randint(0, 23)}:{world.rng.randint(0, 59):02}"
    asks = ["What time is it?", "What is the time?", "Tell me the time.", "How late is it?", "What time is it now?"]
    return Errand(_ask(world, asks), (), time, "time", f"It is {time}.")


_PAIRS: list[tuple[str, ...]] = [("a", "b"), ("x", "y"), ("first", "second")]
TOOL_KINDS = (
    ToolKind(
        ["get_weather", "get_current_weather", "weather", "weather_forecast"],
        [("city",), ("location",), ("place",)],
        ("string",),
        ["Get the current weather in a given location.", "Get the weather in a city.", "The weather in a place."],
        _weather,
    ),
    ToolKind(
        ["add", "add_numbers", "sum"],
        _PAIRS,
        ("integer", "integer"),
        ["Add two numbers.", "The sum of two numbers.", "Adds two numbers."],
        _arithmetic("+", ["What is {a} plus {b}?", "Add {a} and {b}."], lambda a, b: a + b),
        is_arithmetic=True,
    ),
    ToolKind(
        ["subtract", "subtract_numbers", "minus"],
        _PAIRS,
        ("integer", "integer"),
        ["Subtract two numbers.", "The difference of two numbers.", "Takes one number from another one."],
        _arithmetic("-", ["What is {a} minus {b}?"], lambda a, b: a - b),
        is_arithmetic=True,
    ),
    ToolKind(
        ["multiply", "multiply_numbers", "times"],
        _PAIRS,
        ("integer", "integer"),
        ["Multiply two numbers.", "The product of two numbers.", "Multiplies two numbers."],
        _arithmetic("x", ["What is {a} times {b}?", "Multiply {a} by {b}."], lambda a, b: a * b),
        is_arithmetic=True,
    ),
    ToolKind(
        ["set_timer", "start_timer", "timer"],
        [("minutes",), ("duration",)],
        ("integer",),
        ["Set a timer.", "Starts a timer of some minutes.", "A timer that rings after some minutes."],
        _timer,
    ),
    ToolKind(
        ["find_thing", "find_object", "search"],
        [("thing",), ("object",), ("query",)],
        ("string",),
        ["Find a thing.", "Tells where a thing is.", "Looks for a lost thing in the house."],
        _find,
    ),
    ToolKind(
        ["send_message", "send_mail", "write_message"],
        [("to", "text"), ("person", "message"), ("name", "text")],
        ("string", "string"),
        ["Send a message to a person.", "Writes a message to somebody.", "Sends a text to a friend."],
        _message,
    ),
    ToolKind(
        ["get_age", "age", "how_old"],
        [("name",), ("person",)],
        ("string",),
        ["Get the age of a person.", "Tells how old somebody is.", "The age of a friend."],
        _age,
    ),
    ToolKind(
        ["get_home", "home", "where_lives"],
        [("name",), ("person",)],
        ("string",),
        ["Get the home of a person.", "Tells where somebody lives.", "The town in which a friend lives."],
        _home,
    ),
    ToolKind(
        ["buy", "order", "buy_fruit"],
        [("item", "amount"), ("fruit", "count"), ("item", "number")],
        ("string", "integer"),
        ["Buy fruit.", "Orders things from the market.", "Buys an amount of food."],
        _buy,
    ),
    ToolKind(
        ["switch_lamp", "set_light", "turn_lamp"],
        [("state",), ("mode",)],
        ("on|off",),
        ["Switch the lamp on or off.", "Turns the light on or off.", "The light of the room."],
        _lamp,
    ),
    ToolKind(
        ["book_meeting", "plan_meeting", "add_meeting"],
        [("person", "day"), ("name", "date"), ("with", "day")],
        ("string", "string"),
        ["Book a meeting.", "Plans a meeting with a person on a day.", "Puts a visit into the calendar."],
        _meeting,
    ),
    ToolKind(
        ["save_note", "write_note", "remember"],
        [("text",), ("note",)],
        ("string",),
        ["Save a note.", "Writes a text down.", "Keeps a note for later."],
        _note,
    ),
    ToolKind(
        ["get_time", "current_time", "clock"],
        [()],
        (),
        ["Get the time.", "Tells what time it is.", "The time of day."],
        _clock,
    ),
)
