"""The training text of `preset:tiny-llama`: small English documents, generated from a seed.

Stories, lists, counting, definitions, notes on testing an API, and conversations in the preset's chat format. Every
document ends with the end-of-sequence token, so the answers of a trained model end with it.
"""

import random
from collections.abc import Callable, Iterator

BOS, EOS = "<s>", "</s>"
USER, ASSISTANT, SYSTEM = "<|user|>", "<|assistant|>", "<|system|>"


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    "Anna Ben Clara David Emma Finn Grace Henry Iris Jack Kate Leo Maria Noah Olivia Paul Rosa Sam Tina Victor"
)
ANIMALS = _words("fox owl bear rabbit mouse cat dog horse duck frog wolf deer squirrel turtle goat hen")
ADJECTIVES = _words("small old quiet brave clever happy tired gentle curious kind young funny proud shy strong wise")
COLOURS = _words("red blue green yellow white black brown orange purple grey")
THINGS = _words(
    "stone key book lamp basket letter map boat kite drum bell apple coat cup chair box hat ring rope clock"
)
PLACES = _words(
    "forest village garden river mountain market school library harbour farm meadow bridge lake castle town"
)
WEATHER = _words("sunny rainy windy cold warm cloudy snowy foggy")
FRUITS = _words("apples pears plums grapes cherries peaches lemons oranges bananas melons")
FOODS = _words("bread soup cheese rice cake honey salad porridge pie jam")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
LISTS = {
    "fruits": FRUITS,
    "animals": ANIMALS,
    "colours": COLOURS,
    "foods": FOODS,
    "places": PLACES,
    "days of the week": DAYS,
    "months of the year": MONTHS,
    "names": NAMES,
}
NUMBER_WORDS = _words("zero one two three four five six seven eight nine ten eleven twelve")
COMMON = _words(
    "about above across again against almost along also always among another answer around away back because become "
    "been before behind being below between both bring build call came can care carry change child city clear close "
    "colour come could country cover cross cut data day did different do does door down draw each earth easy eat end "
    "enough even ever every example eye face fact fall family far farm father feel feet few field figure fill fire "
    "five floor follow food foot form found four friend from front game gave get give go gold good got grass great "
    "ground group grow had half hand happen has have head hear heart heat heavy help her here him his hold home hope "
    "hour house how hundred idea important inside into island its job join jump just keep kept kilometre kitchen knew "
    "know language large laugh lay lead learn leave left less life like line listen live look love made main make man "
    "many mark may mean measure might mile mind minute miss money more morning most mother move much music must near "
    "need never night north nothing notice now object ocean off often once only order other our out over own page "
    "paper part pass pattern people perhaps person picture piece plan plane plant play point power press problem "
    "product pull put question rain ran reach ready real reason record rest road rock room round rule run said same "
    "sea second see seem sentence serve set several shape she ship should show side simple since sing sit size sleep "
    "slowly snow some something sometimes song soon south space speak stand star start state stay step still stop "
    "street such sure surface system table take talk teach tell ten than that their them there these they thing think "
    "this those thought thousand three through time together told too top toward travel true turn under until upon "
    "usual very voice vowel wait walk war warm watch way week went were what wheel when where which while who whole "
    "why wind window winter wish with without wonder word work world would write year young your"
)
OPPOSITES = {
    "hot": "cold", "big": "small", "old": "new", "fast": "slow", "happy": "sad", "light": "dark", "open": "closed",
    "early": "late", "full": "empty", "loud": "quiet", "high": "low", "long": "short", "wet": "dry", "hard": "soft",
    "clean": "dirty", "near": "far", "first": "last", "strong": "weak", "rich": "poor", "right": "left",
}  # fmt: skip
SOUNDS = {
    "dog": "barks", "cat": "meows", "duck": "quacks", "frog": "croaks", "owl": "hoots", "wolf": "howls",
    "horse": "neighs", "hen": "clucks", "mouse": "squeaks", "bear": "growls",
}  # fmt: skip
DEFINITIONS = {
    "an API": "An API is a way for one program to ask another program for something. It says which requests are "
    "allowed and what the answers look like.",
    "a test": "A test is a small program that checks another program. It runs the code and compares the result with "
    "the expected value.",
    "testing": "Testing is the work of checking that a program does what it should. A good test fails when the code "
    "is wrong and passes when the code is right.",
    "a server": "A server is a program that waits for requests and sends back answers. Many clients can talk to one "
    "server at the same time.",
    "a client": "A client is a program that sends requests to a server and reads the answers.",
    "latency": "Latency is the time between a request and its answer. A low latency feels fast.",
    "throughput": "Throughput is the amount of work done in a second. A high throughput means that many requests are "
    "served.",
    "a token": "A token is a small piece of text. A language model reads tokens and writes tokens, one after another.",
    "a language model": "A language model is a program that predicts the next token of a text. It learns from many "
    "examples.",
    "deep learning": "Deep learning is a kind of machine learning. It uses neural networks with many layers to learn "
    "from data.",
    "machine learning": "Machine learning is a way to build programs that learn from data. The program finds patterns "
    "and uses them to make predictions.",
    "a neural network": "A neural network is a set of simple units in layers. Each layer turns its input into a new "
    "output, and the weights are learned from data.",
    "a batch": "A batch is a group of requests that are computed together. Large batches use the hardware well.",
    "a queue": "A queue is a line of things that wait. The first one in is the first one out.",
    "a cache": "A cache keeps results that may be needed again. Reading from a cache is faster than computing the "
    "result once more.",
    "a database": "A database is a place where a program keeps its data. It can find, change and remove records.",
    "a benchmark": "A benchmark is a test of speed. It runs the same work many times and reports how long it took.",
    "a bug": "A bug is a mistake in a program. Tests help to find bugs before the users do.",
    "a computer": "A computer is a machine that follows instructions. It can store data, do sums and show the result.",
    "a program": "A program is a list of instructions for a computer.",
    "the internet": "The internet is a network of computers all over the world. It carries messages from one computer "
    "to another.",
    "a river": "A river is a long stream of water that flows from the mountains to the sea.",
    "a forest": "A forest is a large place with many trees, plants and animals.",
    "a library": "A library is a place with many books. People can read the books there or take them home.",
    "the sun": "The sun is a star. It gives light and warmth to the earth.",
    "the moon": "The moon is a ball of rock that goes around the earth. It shines at night.",
    "rain": "Rain is water that falls from the clouds. Plants need rain to grow.",
    "a story": "A story tells what happened to someone. It has a beginning, a middle and an end.",
}
GREETINGS = ("Hello", "Hi", "Good morning", "Good evening", "Hey", "Hello there")

Teller = Callable[[random.Random], str]


def documents(seed: int) -> Iterator[str]:
    """An endless stream of documents, each ending with `EOS` and without the leading `BOS`."""
    rng = random.Random(seed)
    while True:
        yield _conversation(rng) if rng.random() < 0.45 else rng.choice(_PROSE)(rng) + EOS


def turn(role: str, content: str) -> str:
    """One message in the format of the preset's chat template."""
    return f"{role}\n{content}{EOS}\n"


def _conversation(rng: random.Random) -> str:
    text = turn(SYSTEM, rng.choice(_SYSTEM_PROMPTS)) if rng.random() < 0.2 else ""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        question, answer = rng.choice(_EXCHANGES)(rng)
        text += turn(USER, question) + turn(ASSISTANT, answer)
    return text.removesuffix("\n")


_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Keep your answers short.",
    "Answer the question in plain words.",
    "You are a careful engineer who likes tests.",
)


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _join(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


def _story(rng: random.Random) -> str:
    name, friend = rng.sample(NAMES, 2)
    animal, adjective, colour = rng.choice(ANIMALS), rng.choice(ADJECTIVES), rng.choice(COLOURS)
    place, other_place = rng.sample(PLACES, 2)
    thing = rng.choice(THINGS)
    opening = rng.choice(
        (
            f"Once upon a time there was {_article(adjective)} {animal} named {name}.",
            f"{name} was {_article(adjective)} {animal} who lived near the {place}.",
            f"In the {place} lived {_article(adjective)} {animal}. Its name was {name}.",
            f"One {rng.choice(WEATHER)} morning, {name} the {animal} walked to the {place}.",
            f"There once was {_article(animal)} called {name}. Everyone in the {place} knew {name}.",
        )
    )
    middle = rng.sample(
        (
            f"{name} liked to sit by the {other_place} and look at the sky.",
            f"One day, {name} found {_article(colour)} {thing} in the {other_place}.",
            f"{name} wanted to know where the {thing} came from.",
            f"So {name} asked {friend}, who knew everything about the {other_place}.",
            f'"Have you seen my {thing}?" asked {friend}.',
            f'"What a fine {colour} {thing}!" said {friend}.',
            f"They walked through the {place} until it was dark.",
            f"It was {rng.choice(WEATHER)}, but {name} did not mind.",
            f"{friend} gave {name} some {rng.choice(FOODS)} and a cup of tea.",
            f"They looked for the {thing} in the {place} and by the {other_place}.",
            f"The {thing} was under {_article(rng.choice(COLOURS))} {rng.choice(THINGS)}.",
            f"{name} was {rng.choice(ADJECTIVES)} and {friend} was {rng.choice(ADJECTIVES)}.",
        ),
        rng.randint(2, 5),
    )
    ending = rng.choice(
        (
            f"In the end, {name} and {friend} went home and were happy.",
            f"From that day on, {name} and {friend} were the best of friends.",
            f"{name} went home, ate some {rng.choice(FOODS)} and fell asleep.",
            f"And so {name} learned that a friend is better than {_article(thing)}.",
            f"That night, {name} put the {thing} on the shelf and smiled.",
        )
    )
    return " ".join((opening, *middle, ending))


def _api_note(rng: random.Random) -> str:
    subject = rng.choice(("API", "server", "service", "endpoint", "model", "client"))
    opening = rng.choice(
        (
            f"Testing {subject} calls is simple.",
            f"Testing API requests is the first thing to do with a new {subject}.",
            f"Testing the {subject} takes a few small steps.",
            "Testing API answers helps us to find mistakes early.",
            f"This note is about testing the {subject}.",
            f"Every {subject} needs a good test.",
        )
    )
    steps = rng.sample(
        (
            "send a request to the server",
            "read the answer",
            "check the status code",
            "compare the text with the expected text",
            "measure the time to the first token",
            "write down the result",
            "start the server",
            "wait until the server is ready",
            "count the tokens in the answer",
            "look at the log",
            "run the test again",
            "stop the server",
        ),
        rng.randint(3, 5),
    )
    words = ("First", "Then", "After that", "Next", "Finally")
    body = " ".join(
        f"{'Finally' if index == len(steps) - 1 else words[index]}, {step}." for index, step in enumerate(steps)
    )
    code = rng.choice((200, 404, 422, 429, 500))
    closing = rng.choice(
        (
            "If the test fails, read the message and try again.",
            "If the answer is wrong, there is a bug.",
            f"A status code of {code} means that {_STATUS[code]}.",
            "A test that never fails tells us nothing.",
            "Small tests are easy to read and quick to run.",
            f"The {subject} is ready when every test has passed.",
        )
    )
    return f"{opening} {body} {closing}"


_STATUS = {
    200: "the request was fine",
    404: "nothing was found",
    422: "the input was not valid",
    429: "there were too many requests",
    500: "the server made a mistake",
}


def _definition(rng: random.Random) -> str:
    return " ".join(DEFINITIONS[term] for term in rng.sample(list(DEFINITIONS), rng.randint(1, 3)))


def _day(rng: random.Random) -> str:
    name, day = rng.choice(NAMES), rng.choice(DAYS)
    doings = rng.sample(
        (
            f"went to the {rng.choice(PLACES)}",
            f"ate {rng.choice(FOODS)} with {rng.choice(FRUITS)}",
            f"wrote a letter to {rng.choice(NAMES)}",
            f"bought {_article(rng.choice(COLOURS))} {rng.choice(THINGS)}",
            f"read a book about {_article(rng.choice(ANIMALS))}",
            f"played with the {rng.choice(ANIMALS)}",
            "cleaned the house",
            "listened to the rain",
        ),
        3,
    )
    return (
        f"On {day}, {name} {doings[0]}. Then {name} {doings[1]}. In the evening, {name} {doings[2]}. "
        f"It was a {rng.choice(WEATHER)} day in {rng.choice(MONTHS)}."
    )


def _listing(rng: random.Random) -> str:
    kind = rng.choice(list(LISTS))
    chosen = rng.sample(LISTS[kind], min(rng.randint(3, 6), len(LISTS[kind])))
    return f"Here are some {kind}:\n" + "\n".join(f"{number}. {word}" for number, word in enumerate(chosen, 1))


def _count_up(rng: random.Random) -> tuple[int, int, str]:
    first = rng.randint(1, 40)
    last = first + rng.randint(3, 12)
    return first, last, ", ".join(map(str, range(first, last + 1)))


def _counting(rng: random.Random) -> str:
    first, last, numbers = _count_up(rng)
    return f"Counting from {first} to {last}: {numbers}."


def _chant(rng: random.Random) -> str:
    jumper, other = rng.sample(ANIMALS, 2)
    line = f"The {rng.choice(COLOURS)} {jumper} jumps over the {rng.choice(ADJECTIVES)} {other}."
    return " ".join([line] * rng.randint(2, 5))


def _code(rng: random.Random) -> str:
    name, field = rng.choice(THINGS), rng.choice(("size", "price", "name", "colour", "age", "weight"))
    return (
        f"def {field}_of_{name}({name}):\n    return {name}.{field}\n\n\n"
        f"def test_{field}_of_{name}():\n    assert {field}_of_{name}({name.title()}({field}={rng.randint(1, 99)})) "
        "is not None\n"
    )


Exchange = Callable[[random.Random], tuple[str, str]]


def _ask_definition(rng: random.Random) -> tuple[str, str]:
    term = rng.choice(list(DEFINITIONS))
    name = term.title() if rng.random() < 0.1 else term
    question = rng.choice((f"What is {name}?", f"What is {name}?", f"Explain {name}.", f"Tell me about {name}."))
    return question, DEFINITIONS[term]


def _ask_sum(rng: random.Random) -> tuple[str, str]:
    left, right = rng.randint(0, 12), rng.randint(0, 12)
    if rng.random() < 0.3:
        left, right = max(left, right), min(left, right)
        return f"What is {left} minus {right}?", f"{left} minus {right} is {left - right}."
    return f"What is {left} plus {right}?", f"{left} plus {right} is {left + right}."


def _ask_counting(rng: random.Random) -> tuple[str, str]:
    first, last, numbers = _count_up(rng)
    return f"Count from {first} to {last}.", f"{numbers}."


def _ask_list(rng: random.Random) -> tuple[str, str]:
    kind = rng.choice(list(LISTS))
    number = rng.randint(2, 6)
    question = f"Name {NUMBER_WORDS[number]} {kind}."
    chosen = rng.sample(LISTS[kind], number)
    if rng.random() < 0.5:
        return question, f"{NUMBER_WORDS[number].title()} {kind} are {_join(chosen)}."
    return question, "\n".join(f"{index}. {word}" for index, word in enumerate(chosen, 1))


def _ask_opposite(rng: random.Random) -> tuple[str, str]:
    word, opposite = rng.choice(list(OPPOSITES.items()))
    return f"What is the opposite of {word}?", f"The opposite of {word} is {opposite}."


def _ask_sound(rng: random.Random) -> tuple[str, str]:
    animal, sound = rng.choice(list(SOUNDS.items()))
    return f"What sound does {_article(animal)} make?", f"{_article(animal).capitalize()} {sound}."


def _ask_day(rng: random.Random) -> tuple[str, str]:
    index = rng.randrange(7)
    if rng.random() < 0.5:
        return f"Which day comes after {DAYS[index]}?", f"{DAYS[(index + 1) % 7]} comes after {DAYS[index]}."
    return f"Which day comes before {DAYS[index]}?", f"{DAYS[index - 1]} comes before {DAYS[index]}."


def _ask_repeat(rng: random.Random) -> tuple[str, str]:
    phrase = f"the {rng.choice(COLOURS)} {rng.choice(THINGS)}"
    number = rng.randint(2, 4)
    return f'Say "{phrase}" {NUMBER_WORDS[number]} times.', f"{', '.join([phrase] * number).capitalize()}."


def _ask_spelling(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(COMMON)
    if rng.random() < 0.3:
        return f'How many letters are in "{word}"?', f'The word "{word}" has {len(word)} letters.'
    return f'Spell "{word}".', f"{', '.join(word)}."


def _ask_story(rng: random.Random) -> tuple[str, str]:
    story = _story(rng)
    return rng.choice(("Tell me a story.", "Write a short story.", "Please tell me a short story.")), story


def _ask_test(rng: random.Random) -> tuple[str, str]:
    subject = rng.choice(("an API", "a server", "my program", "a client", "this function"))
    return rng.choice((f"How do I test {subject}?", f"How can I test {subject}?")), _api_note(rng)


def _ask_code(rng: random.Random) -> tuple[str, str]:
    return "Write a small test in Python.", _code(rng).rstrip("\n")


def _ask_json(rng: random.Random) -> tuple[str, str]:
    name, age, animal = rng.choice(NAMES), rng.randint(3, 90), rng.choice(ANIMALS)
    return (
        f"{name} is {age} years old and has {_article(animal)}. Give me that as JSON.",
        f'{{"name": "{name}", "age": {age}, "animal": "{animal}"}}',
    )


def _ask_memory(rng: random.Random) -> tuple[str, str]:
    name, colour, thing, place = rng.choice(NAMES), rng.choice(COLOURS), rng.choice(THINGS), rng.choice(PLACES)
    statement = f"{name} put the {colour} {thing} in the {place}."
    return rng.choice(
        (
            (f"{statement} Where is the {thing}?", f"The {thing} is in the {place}."),
            (f"{statement} What colour is the {thing}?", f"The {thing} is {colour}."),
            (f"{statement} Who put the {thing} there?", f"{name} put it there."),
        )
    )


def _greet(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.3:
        return rng.choice(("How are you?", "How are you today?")), "I am fine, thank you. How can I help you?"
    if rng.random() < 0.3:
        return rng.choice(("Thank you.", "Thanks!", "Thank you very much!")), "You are welcome!"
    name = rng.choice(NAMES)
    return rng.choice(
        (
            (f"{rng.choice(GREETINGS)}!", "Hello! How can I help you today?"),
            (f"{rng.choice(GREETINGS)}, my name is {name}.", f"Hello {name}! How can I help you today?"),
            ("Who are you?", "I am a tiny language model. I was made for tests."),
            ("What can you do?", "I can tell stories, count, make lists and answer simple questions."),
        )
    )


_EXCHANGES: tuple[Exchange, ...] = (
    _ask_definition, _ask_definition, _ask_definition, _ask_sum, _ask_counting, _ask_list, _ask_opposite, _ask_sound,
    _ask_day, _ask_repeat, _ask_story, _ask_story, _ask_test, _ask_test, _ask_code, _ask_json, _ask_memory, _greet,
    _greet, _ask_spelling,
)  # fmt: skip


def _question_and_answer(rng: random.Random) -> str:
    """A question and its answer without the chat format, so that the model also answers plain questions."""
    return rng.choice((" ", "\n")).join(rng.choice(_EXCHANGES)(rng))


_PROSE: tuple[Teller, ...] = (
    _story, _story, _story, _api_note, _api_note, _definition, _day, _listing, _counting, _chant, _code,
    _question_and_answer, _question_and_answer, _question_and_answer,
)  # fmt: skip
