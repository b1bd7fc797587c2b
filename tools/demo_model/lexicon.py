"""The words and sentence patterns that the demo model's texts are made of (see corpus.py)."""

STARTS = "Al Bel Bran Cor Dal Del Dor El Fal Fen Gar Hal Ha Jor Ka Kel Lar Len Lo Mar Mel Mi Nal Nor Ol Per Pim Quin Ra Ros Sal Sel Ta Tel Tor Ul Val Ven Wil Yar Za Zel".split()
ENDS = "a an ba bert da den dis do el fi ga gin ia ida ik in ka la len li lo ma mi mo na nel ni no ra ric rin ro sa sha tan ti to va vin wen".split()
TOWN_ENDS = (
    "berg bridge brook bury dale field ford gate ham haven hill mere mouth port stead ton vale wick wood worth".split()
)

CITIES = [
    *"Amsterdam Athens Barcelona Berlin Boston Bristol Brussels Cairo Chicago Dublin Geneva Hamburg Helsinki Lisbon London Lyon Madrid Milan Moscow Munich Naples Oslo Oxford Paris Prague Rome Seattle Stockholm Sydney Tokyo Turin Vienna Warsaw Zurich".split(),
    *["Cape Town", "Hong Kong", "Los Angeles", "New Delhi", "New York", "San Diego", "San Francisco"],
]
PEOPLE = "Alice Anna Ben Bob Carol Clara Daniel Dave David Emma Eric Eva Frank George Grace Henry Jack James Jane John Julia Laura Leo Lisa Lucy Maria Mark Mary Max Nina Oliver Oscar Paul Peter Robert Rosa Sam Sarah Simon Sofia Susan Tom".split()

ANIMALS = "badger bear beaver cat crow deer dog duck fox frog goat goose hare hedgehog horse lizard mole mouse otter owl pony rabbit sheep snail sparrow squirrel turtle wolf".split()
FRUITS = "apples apricots berries cherries figs grapes lemons limes melons oranges peaches pears plums".split()
FOODS = [*FRUITS, *"bread cake carrots cheese honey noodles nuts pancakes pie porridge rice soup".split()]
THINGS = "basket bell blanket boat book bottle box brush button candle coat compass cup drum flute hat jar kettle key kite ladder lamp lantern map mirror pencil pillow ring rope scarf spoon umbrella watch whistle".split()
COLOURS = "black blue brown golden green grey orange pink purple red silver white yellow".split()
JOBS = "baker builder carpenter cook doctor driver farmer fisher gardener miller nurse painter pilot potter sailor singer tailor teacher weaver writer".split()
PLACES = [
    "the forest",
    "the garden",
    "the harbour",
    "the hill",
    "the lake",
    "the market",
    "the meadow",
    "the mill",
    "the old bridge",
    "the old tower",
    "the orchard",
    "the river",
    "the valley",
    "the village square",
]
HOMES = [
    "a cosy house near",
    "a little hut beside",
    "a quiet cave behind",
    "a small cottage close to",
    "a tall tree not far from",
    "an old barn next to",
]
HOBBIES = [
    "collect smooth stones",
    "count the stars",
    "draw small pictures",
    "grow flowers",
    "listen to the wind",
    "make paper boats",
    "read old stories",
    "sing in the morning",
    "tell jokes",
    "watch the clouds",
]
TRAITS = "brave careful cheerful clever curious friendly gentle kind lively patient polite quiet shy".split()
SIZES = "big little old small tall tiny young".split()
WEATHER = [
    "the air was cold and clear",
    "the rain fell softly",
    "the sky was full of clouds",
    "the snow lay on the ground",
    "the sun was shining",
    "the wind was blowing hard",
]
SKIES = "clear cloudy cold dry foggy hot rainy snowy stormy sunny warm wet windy".split()
TIMES = [
    "Early in the morning",
    "Late in the afternoon",
    "On a bright spring day",
    "On a cold winter day",
    "On a quiet evening",
    "On a warm summer day",
    "One day",
    "One fine autumn day",
    "One morning",
]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
FACT_KINDS = ["town", "age", "food", "job", "thing", "animal"]
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "up": "down",
    "day": "night",
    "young": "old",
    "full": "empty",
    "dark": "light",
    "near": "far",
    "high": "low",
    "hard": "soft",
    "wet": "dry",
    "happy": "sad",
    "early": "late",
    "open": "closed",
    "loud": "quiet",
    "strong": "weak",
    "left": "right",
    "first": "last",
    "long": "short",
}
# Emoji are kept out of the tokenizer's training text, so that each takes several byte tokens, which a stream must join.
EMOJI = {
    "sun": "☀",
    "star": "⭐",
    "heart": "❤",
    "smile": "😀",
    "fish": "🐟",
    "tree": "🌳",
    "moon": "🌙",
    "flower": "🌸",
    "cat": "🐱",
    "dog": "🐶",
    "apple": "🍎",
    "boat": "⛵",
}
LISTS = {
    "animals": ANIMALS,
    "fruits": FRUITS,
    "colours": COLOURS,
    "jobs": JOBS,
    "foods": FOODS,
    "things in a house": THINGS,
}

# Each arc is a list of beats, the parts of a story. A beat is a tuple of alternative sentences. {h} hero, {f} friend,
# {t} thing, {p} place, {c} colour, {d} food.
ARCS: dict[str, list[tuple[str, ...]]] = {
    "lost a {t}": [
        ("{T}, {h} wanted to use the {c} {t}, but it was gone.", "{T}, {h} saw that the {c} {t} was missing."),
        (
            "{h} looked under the bed and behind the door.",
            "{h} searched every corner of the house.",
            "First {h} looked on the shelf, and then under the table.",
        ),
        (
            "It was not there, so {h} went to ask {f} for help.",
            "There was no trace of it, and {h} felt sad.",
            "After an hour {h} sat down and sighed.",
        ),
        (
            '"Do not worry," said {f}. "We will look for it together."',
            '"Let us go to {p}," said {f}. "You were there yesterday."',
        ),
        ("The two friends walked to {p} and looked at every stone.", "They followed the path to {p} step by step."),
        (
            "At last {h} saw something {c} in the grass.",
            "Then {f} pointed at a {c} spot between two leaves.",
            "Near an old log, something {c} was shining.",
        ),
        ("It was the {t}, a little dusty but not broken.", "There lay the {t}, safe and dry."),
        ("{h} thanked {f} and shared some {d} on the way home.", "That evening they ate {d} and laughed about it."),
    ],
    "found a {t}": [
        (
            "{T}, {h} was walking near {p} and stepped on something hard.",
            "{T}, {h} went to {p} and found something strange.",
        ),
        ("It was a {c} {t}, half covered with leaves.", "In the mud lay a {c} {t} that nobody had ever seen before."),
        ('"Who could have lost this?" {h} wondered.', "{h} turned it around and wondered who it belonged to."),
        (
            "{h} could have kept it, but that did not feel right.",
            "It was very pretty, and {h} wanted to keep it for a moment.",
        ),
        ("So {h} asked everybody at {p}, one after the other.", "So {h} put up a sign that said: FOUND, ONE {t}."),
        ('In the end {f} came running. "That is mine!" said {f}.', "Soon {f} came by and smiled from ear to ear."),
        ("{f} had been looking for the {t} for three days.", "The {t} had been a present from the grandmother of {f}."),
        (
            "To say thank you, {f} brought {h} a basket full of {d}.",
            "{f} was so glad that they shared some {d} at once.",
        ),
    ],
    "made a present": [
        (
            "{T}, {h} remembered that {f} had a birthday soon.",
            "{T}, {h} learned that it was almost the birthday of {f}.",
        ),
        ("{h} had no money, but {h} had two good hands.", "There was nothing in the shop that {h} liked."),
        ('"I will make a {t} myself," said {h}.', "So {h} decided to make a {c} {t}."),
        (
            "It was hard work, and the first try fell apart.",
            "The first one was crooked, and the second one was too small.",
        ),
        ("{h} did not give up and tried once more.", "But {h} took a deep breath and began again."),
        (
            "After a while the {t} was ready, and {h} painted it {c}.",
            "When the moon came up, a fine {c} {t} stood on the table.",
        ),
        (
            "On the birthday, {h} carried it to {p}, where {f} was waiting.",
            "The next day all the friends met at {p}, and {h} brought the present.",
        ),
        (
            '"This is the best present of all!" said {f}, and everybody ate {d}.',
            "{f} was so happy that nobody noticed the {d} were already gone.",
        ),
    ],
    "got lost": [
        (
            "{T}, {h} went for a walk to {p} with a {t} and some {d}.",
            "{T}, {h} packed some {d} and a {c} {t} and left for {p}.",
        ),
        (
            "The path turned left, then right, and then it was gone.",
            "A thick fog came up, and soon {h} could not see the path.",
        ),
        ("{h} called out, but only an echo answered.", "Everything looked the same, and {h} began to worry."),
        ("{h} sat down, ate some {d} and thought about it.", "Being careful, {h} stayed in one place and waited."),
        ("Then {h} had an idea and held up the {t}.", "Then {h} remembered the {t} and used it to make a sign."),
        ("Far away, {f} saw it and came as fast as possible.", "It did not take long until {f} saw the sign."),
        ('"I am so glad to see you!" said {h}.', '"Here you are!" said {f}. "Everybody is looking for you."'),
        (
            "From that day on, {h} always told somebody before going to {p}.",
            "They walked home together, and the way did not seem long at all.",
        ),
    ],
    "helped a friend": [
        ("{T}, {h} heard somebody calling from {p}.", "{T}, there was a loud cry from {p}, and {h} ran to see."),
        ("It was {f}, who could not move because of a heavy branch.", "It was {f}, who had fallen into a hole."),
        ('"Please help me," said {f} in a weak voice.', '"I have been here since noon," said {f}.'),
        ("{h} was not strong, but {h} had a {c} {t}.", "{h} looked around and saw an old {t}."),
        ("With the {t} and a lot of patience, it could be done.", "{h} used the {t} in a way nobody had thought of."),
        ("One, two, three, and {f} was free.", "After three tries {f} was out and could stand again."),
        ("{f} gave {h} a long hug.", '"You are a true friend," said {f}.'),
        (
            "The next day they had {d} together and made a plan for the summer.",
            "Since then the two have {d} together every week.",
        ),
    ],
    "won a race": [
        ("{T}, there was a big race from {p} to the village.", "{T}, all the animals came to {p} for a race."),
        ("The prize was a {c} {t}.", "Whoever came first would get a {c} {t}."),
        (
            "{f} was the fastest, and everybody was sure that {f} would win.",
            "Nobody believed that {h} could win against {f}.",
        ),
        ("{h} started slowly and saved some strength.", "At the start {h} was the very last."),
        ("Half way, {f} stopped to eat some {d}.", "In the middle of the race, {f} lay down for a nap."),
        ("{h} went on, step after step, without a break.", "Meanwhile {h} kept going and did not look back."),
        ("When {f} noticed it, {h} had already reached the goal.", "In the end {h} won by the length of a nose."),
        ('{h} gave the {t} to {f} and said, "You will win next time."', "Everybody cheered, and even {f} clapped."),
    ],
    "learned to cook": [
        ("{T}, {h} wanted to cook {d} for the first time.", "{T}, {h} found an old recipe for {d}."),
        (
            "{h} took the {c} {t} and went to {p} to fetch what was needed.",
            "Some things were missing, so {h} went to {p} with the {c} {t}.",
        ),
        ("On the way {h} met {f}, who was a very good cook.", "There stood {f}, who knew everything about cooking."),
        ('"You have to be patient," said {f}.', '"The secret is to stir slowly," {f} explained.'),
        ("At first the kitchen was full of smoke.", "The first pot was burned, and the second was too salty."),
        ("The third time, it smelled wonderful.", "But then everything went well."),
        (
            "{h} put the {d} on the table and invited the neighbours.",
            "In the evening the whole street came to taste it.",
        ),
        ("Nothing was left at the end, and {h} was proud.", "Since that day {h} has cooked for {f} every Sunday."),
    ],
    "saved the village": [
        ("{T}, the water began to rise near {p}.", "{T}, a strong storm came over {p}."),
        ("Everybody was asleep, only {h} was awake.", "{h} was the first to notice it."),
        (
            "{h} grabbed the {c} {t} and ran to the house of {f}.",
            "With the {c} {t} in one hand, {h} knocked on the door of {f}.",
        ),
        ('"Wake up!" cried {h}. "We have to warn the others."', '"There is no time to lose," said {h}.'),
        ("Together they went from door to door.", "They made so much noise that everybody woke up."),
        ("All of them carried sacks of sand until the sun came up.", "They built a wall of stones, and the wall held."),
        ("When the storm was over, not one house was damaged.", "In the morning the danger was gone."),
        (
            "The village thanked {h} and {f} with a feast of {d}.",
            "There was {d} for everyone, and {h} had the best seat.",
        ),
    ],
    "planted a tree": [
        ("{T}, {h} found a small seed at {p}.", "{T}, {f} gave {h} a tiny seed."),
        ("{h} carried it home in a {c} {t}.", "There was a {c} {t} in the shed, and {h} filled it with earth."),
        ("Day after day {h} gave it water.", "{h} put it in the sun and watered it."),
        ("For a long time nothing happened, and {f} laughed about it.", '"Nothing will ever grow there," said {f}.'),
        (
            "But one morning a green leaf came out of the earth.",
            "Then, after a night of rain, a little plant could be seen.",
        ),
        (
            "The plant grew and grew, until it was taller than {h}.",
            "In spring it was planted near {p}, where everybody could see it.",
        ),
        ("Years later, all the children played under the tree.", "Now it is the finest tree far and wide."),
        (
            '"I was wrong," said {f}, and brought {d} for both of them.',
            "Every summer {h} and {f} sit there and eat {d}.",
        ),
    ],
}
MORALS = [
    "And they all lived happily.",
    "It is good to have a friend.",
    "{h} slept very well that night.",
    "What a day it had been!",
    "{h} never forgot that day.",
    "That is how {h} and {f} became best friends.",
    "And if you visit {p}, you may still hear this story.",
    "Everybody was glad that it ended so well.",
]

SMALL_TALK = [
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Hello", "Hello! How can I help you?"),
    ("Good morning!", "Good morning! What can I do for you?"),
    ("Good evening!", "Good evening! What can I do for you?"),
    ("How are you?", "I am fine, thank you. And you?"),
    ("I am fine too.", "I am glad to hear that."),
    ("Thank you!", "You are welcome!"),
    ("Thanks.", "You are welcome!"),
    ("Goodbye!", "Goodbye! Have a nice day!"),
    ("Bye", "Goodbye! Have a nice day!"),
    ("Who are you?", "I am the small demo model that comes with this server."),
    ("What are you?", "I am the small demo model that comes with this server."),
    (
        "What can you do?",
        "I can tell short stories, answer simple questions, add small numbers, write lists and write JSON.",
    ),
    ("Help", "I can tell short stories, answer simple questions, add small numbers, write lists and write JSON."),
    ("What is your name?", "I have no name. I am only a small demo model."),
]
