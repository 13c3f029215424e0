"""Code: small tasks, mostly in Python, concepts to explain, snippets to read, to change and to test."""

from __future__ import annotations

import random

from .slots import fill

FUNCTION = (  # Write a function that ..
    "returns the sum of a list of numbers|returns the product of a list of numbers|returns the largest number in a list|"
    "returns the smallest number in a list|returns the average of a list|counts the vowels in a string|counts the "
    "words in a sentence|reverses a string|checks whether a string is a palindrome|returns the factorial of a number|"
    "returns the first n Fibonacci numbers|checks whether a number is prime|lists all primes up to n|returns the even "
    "numbers of a list|returns the odd numbers of a list|removes duplicates from a list|sorts a list of words by length|"
    "sorts a list of numbers in descending order|converts Celsius to Fahrenheit|converts kilometres to miles|converts "
    "minutes to hours and minutes|checks whether a year is a leap year|returns the number of days in a month|counts "
    "how often each letter occurs in a string|counts how often each element occurs in a list|finds the longest word in "
    "a sentence|capitalises the first letter of each word|removes all spaces from a string|replaces every vowel with a "
    "star|checks whether two words are anagrams|returns the common elements of two lists|returns the difference of two "
    "lists|merges two dictionaries|swaps the keys and values of a dictionary|returns the key with the largest value|"
    "flattens a list of lists|splits a list into chunks of size n|rotates a list by k places|returns the last n elements "
    "of a list|computes the area of a circle|computes the area of a triangle|computes the distance between two points|"
    "computes the greatest common divisor of two numbers|computes the power of a number without using **|computes the "
    "sum of the digits of a number|reverses the digits of a number|checks whether a number is perfect|checks whether a "
    "number is even|returns the absolute value without abs|returns the median of a list|returns the mode of a list|"
    "returns the standard deviation of a list|multiplies two matrices|transposes a matrix|adds two matrices|prints a "
    "multiplication table|prints a triangle of stars|prints the numbers from 1 to 100, with Fizz and Buzz|converts a "
    "decimal number to binary|converts a binary string to a number|converts a string to a list of characters|joins a "
    "list of words with commas|checks whether a string contains only digits|checks whether an e-mail address looks valid|"
    "checks whether a password is strong|generates a random password|rolls two dice|shuffles a list|picks a random "
    "element of a list|reads a file and returns its lines|counts the lines of a file|writes a list to a file|appends a "
    "line to a file|copies a file|lists all files in a folder|reads a JSON file|writes a dictionary to a JSON file|"
    "returns the current date as text|computes a person's age from a birth date|counts the days between two dates|adds "
    "tax to a price|computes compound interest|computes the body mass index|turns a grade in percent into a letter|"
    "encrypts a text with a Caesar cipher|decodes a Caesar cipher|compresses a string with run lengths|finds the first "
    "repeated character|finds the missing number in a list from 1 to n|finds two numbers with a given sum|finds the "
    "index of an element|finds all positions of a letter in a word|finds the longest common prefix of a list of words|"
    "moves all zeros to the end of a list|sorts a list with bubble sort|sorts a list with insertion sort|sorts a list "
    "with selection sort|sorts a list with quicksort|sorts a list with merge sort|searches a list from front to back|"
    "inserts a number into a sorted list|checks whether a list is sorted|returns the union of two sets|removes a key "
    "from a dictionary|filters a dictionary by its values|sorts a dictionary by its values|groups words by their first "
    "letter|groups numbers into even and odd|zips two lists into a dictionary|returns the running total of a list|returns "
    "the squares of a list|doubles every number of a list|clips a number to a range|rounds a price to two decimals|formats "
    "a number with commas|pads a string with zeros|truncates a long text|counts the uppercase letters|swaps upper and "
    "lower case|removes punctuation from a text|splits a name into first and last name|makes initials from a name|turns a "
    "sentence into title case|turns snake case into camel case|checks whether a string starts with a given word|counts "
    "a substring in a text|prints a list with numbered lines|asks the user for a number until it is valid|plays a guessing "
    "game|simulates a coin toss|draws a square with turtle|computes the nth triangular number|computes the sum of squares "
    "up to n|approximates pi|solves a quadratic equation|solves the Tower of Hanoi|computes the Collatz sequence|adds two "
    "numbers given as strings|evaluates a polynomial|traverses a binary tree in order|computes the height of a binary "
    "tree|reverses a linked list|counts the nodes of a linked list|searches a graph breadth first|searches a graph depth "
    "first|pushes and pops on a stack|measures how long a function takes|returns a default when a key is missing|divides "
    "two numbers and handles division by zero|downloads a web page|parses a line of comma separated values|returns the "
    "nth element from the end|interleaves two lists|checks whether all elements are equal|checks whether a list contains "
    "a number greater than a limit|counts the negative numbers|returns the indices of the largest elements|multiplies all "
    "digits of a number|checks whether a number is a square|returns the divisors of a number|returns the prime factors "
    "of a number|converts seconds to hours, minutes and seconds|turns a number into words|computes a discount|splits a "
    "bill between friends|keeps a score").split("|")

LISTS = {
    "does": FUNCTION,
    "language": "Python Python Python Python Python Python JavaScript JavaScript Java C C++ Go Rust Ruby TypeScript".split(),
    "name": "compute process run calc get_values helper main solve update build check transform apply find make".split(),
    "items": "items numbers values data words names prices scores rows points letters ages colours".split(),
    "x": "x n i k value item num elem".split(),
    "class": ("BankAccount|Rectangle|Circle|Student|Car|Book|Library|Dog|Person|Employee|Stack|Queue|Counter|Timer|Point|Vector|"
              "Matrix|ShoppingCart|Product|Playlist|Song|TodoList|Task|Inventory|Player|Dice|Card|Deck|Temperature|Clock|"
              "Animal|Robot|Address|Contact|PhoneBook|Message|Logger|Invoice|Recipe|Garden|Ticket|Elevator|Thermostat|Wallet|"
              "Notebook|Calendar|Event|Team|LinkedList|BinaryTree|Graph|Polynomial|Money|Shape").split("|"),
    "concept": ("a variable|a function|a loop|a for loop|a while loop|an if statement|a list|a dictionary|a set|a tuple|a string|a "
                "class|an object|inheritance|polymorphism|encapsulation|recursion|an exception|a module|an import|a decorator|a "
                "generator|an iterator|a lambda function|a list comprehension|a dictionary comprehension|slicing|indexing|string "
                "formatting|an f-string|type hints|a boolean|an integer|a float|None|scope|a global variable|a default argument|"
                "keyword arguments|*args and **kwargs|a return value|a docstring|a comment|debugging|unit testing|an assertion|a "
                "virtual environment|pip|a package|a stack|a queue|a linked list|a binary tree|a hash table|a graph|a heap|big O "
                "notation|sorting|binary numbers|bitwise operators|a compiler|an interpreter|an API|JSON|a database|SQL|a primary "
                "key|an index in a database|a join|HTML|CSS|HTTP|a web server|a cookie|Git|a commit|a branch|a merge conflict|a "
                "pull request|a thread|a process|asynchronous code|a deadlock|memory management|garbage collection|a pointer|a "
                "reference|an array|a struct|an interface|an abstract class|a constructor|a method|a static method|operator "
                "overloading|a regular expression|a file handle|a context manager|a closure|map and filter|immutability|a pure "
                "function|an algorithm|a data structure|pseudocode|version control|an IDE|the command line|an environment variable|"
                "a cache|encryption|a hash function|a race condition|dynamic programming|a greedy algorithm|machine learning").split("|"),
    "reader": "a beginner|a child|a student|somebody who knows only Excel|a friend|a colleague|a class|a new programmer".split("|"),
    "table": "customers orders books students employees products movies cities teachers flights songs rooms".split(),
    "column": "name price age city year salary title date rating country amount grade".split(),
    "app": ("a calculator|a to-do list|a number guessing game|a quiz|a rock, paper, scissors game|a password generator|a unit "
            "converter|a temperature converter|a word counter|a tic-tac-toe game|a hangman game|a contact book|a simple bank|a "
            "shopping list|a timer|a stopwatch|a dice game|a text adventure|a note taker|a grade book|a budget tracker|a "
            "currency converter|a menu for a restaurant|a calendar|a chatbot with fixed answers|a file organiser|a countdown|a "
            "vending machine|a parking meter|a flashcard trainer").split("|"),
    "library": "NumPy pandas matplotlib random math datetime json os re collections itertools csv requests sqlite3 pathlib".split(),
    "error": ("IndexError: list index out of range|KeyError: 'name'|TypeError: 'int' object is not callable|NameError: name 'x' is not "
              "defined|ZeroDivisionError: division by zero|IndentationError: expected an indented block|ValueError: invalid literal "
              "for int()|AttributeError: 'NoneType' object has no attribute 'append'|ModuleNotFoundError|SyntaxError: invalid syntax|"
              "FileNotFoundError|RecursionError: maximum recursion depth exceeded|TypeError: can only concatenate str|UnboundLocalError").split("|"),
    "extra": ("||||| Add a docstring.| Include an example.| Explain how it works.| Do not use built-in functions.| Keep it "
              "short.| Use recursion.| Use a loop.| Add type hints.| Add comments.| Write a test for it.| Handle empty input.").split("|"),
}

SNIPPETS = (
    "for $x in range(#1-4, #5-12):\n    print($x «* #2-9|+ #1-9|** 2|% 2»)",
    "$items = [#1-20, #1-20, #1-20, #1-20]\ntotal = 0\nfor $x in $items:\n    total += $x\nprint(total)",
    "def $name($x):\n    return $x «* #2-9|+ #2-9|- #2-9|** 2»\n\nprint($name(#1-20))",
    "def $name($items):\n    return [$x «* 2|+ 1|** 2» for $x in $items «if $x > #1-9|if $x % 2 == 0|»]\n\nprint($name([#1-9, #3-15, #1-20]))",
    "$x = #1-30\nif $x > #5-20:\n    print(\"«big|high|yes»\")\nelse:\n    print(\"«small|low|no»\")",
    "$x = #20-60\nwhile $x > #1-10:\n    $x = $x «// 2|- #3-9|- 5»\nprint($x)",
    "$items = {\"«a|red|tea»\": #1-9, \"«b|blue|milk»\": #1-9}\nfor key in $items:\n    print(key, $items[key])",
    "text = \"«hello world|green apples|open the door|good morning»\"\nprint(text«.upper()|.split()|[::-1]|[:#2-5]|.replace(\"o\", \"0\")|.title()»)",
    "def $name($x):\n    if $x <= 1:\n        return 1\n    return $x * $name($x - 1)\n\nprint($name(#3-7))",
    "class $class:\n    def __init__(self, name):\n        self.name = name\n\n    def show(self):\n        return \"«I am |This is |Name: »\" + self.name\n\nprint($class(\"«Max|Ada|Tim|Sue»\").show())",
    "$items = [«3, 1, 2|\"b\", \"a\", \"c\"|#1-9, #1-9, #1-9, #1-9|\"pear\", \"fig\", \"plum\"»]\n$items.«sort()|reverse()|append($items[0])|pop()»\nprint($items)",
    "try:\n    $x = int(\"«#1-99|abc|4.5|ten»\")\n    print($x + #1-9)\nexcept ValueError:\n    print(\"«no number|wrong|error»\")",
    "$name = lambda $x, y: $x «+|*|-|//» y\nprint($name(#5-30, #1-9))",
    "for $x in range(#2-4):\n    for y in range(#2-4):\n        print($x, y, $x «+|*» y)",
    "words = [\"«sun|cat|map|tree»\", \"«river|stone|cloud»\", \"«go|up|no»\"]\nprint(«len(words)|max(words, key=len)|\"-\".join(words)|[len(w) for w in words]|sorted(words)»)",
    "def $name($items):\n    result = {}\n    for $x in $items:\n        result[$x] = result.get($x, 0) + 1\n    return result",
    "with open(\"«notes|data|log».txt\") as file:\n    for line in file:\n        print(line.«strip()|upper()|split(\",\")»)",
    "import «random|math»\n\ndef $name():\n    return «random.randint(1, #6-20)|math.sqrt(#4-100)|random.choice([1, 2, 3])»\n\nprint($name())",
)

ON_SNIPPETS = (
    "What does this code «print|do»?\n\n", "Explain this code «line by line|to $reader|in one sentence|in simple words»:\n\n", "What is the output of this code?\n\n",
    "«Rewrite|Improve|Shorten» this code:\n\n", "Add comments to this code:\n\n", "Turn this code into a function:\n\n", "Is there a mistake in this code?\n\n",
    "Translate this code into «JavaScript|Java|C|Ruby|Go»:\n\n", "Write a test for this code:\n\n", "What would you change in this code, and why?\n\n",
)

TASKS = (
    "Write a $language function that $does.$extra", "Write a $language program that $does.$extra", "«How do I write|Can you write|Show me|I need» a «$language |Python »function that $does?",
    "Write a Python function `$name($items)` that $does.$extra", "Give me $language code that $does.$extra", "Write a function in $language that $does«, and a second one that $does2|».",
    "Implement a «Python |»function that $does, then explain it to $reader.", "Write a one-liner in Python that $does.", "Write a short Python script that $does.$extra",
)
OTHERS = (
    "Write a «$language|Python» class $class«| with two methods| with a constructor and a method to print it| with three attributes| and show how it is used».$extra",
    "Write a Python class $class and a subclass of it.", "Add a method to a Python class $class that $does.", "Design the classes for $app in Python.",
    "What is $concept?", "Explain $concept «in $language|in Python|to $reader|with an example|in simple words».", "What is the difference between $concept and $concept2?",
    "When should I use $concept?", "Give «an|a short» example of $concept in $language.", "Why do programmers need $concept?", "What are common mistakes with $concept?",
    "Write «three|two|five» interview questions about $concept«, with answers|».", "Write $app in $language.", "How would you build $app «in Python|step by step»?",
    "Write the pseudocode of $app.", "Write a Python program for $app that saves its data to a file.", "How do I use the $library library in Python?",
    "Show me an example of $library.", "Write a Python script with $library that $does.", "What can $library do?",
    "I get \"$error\". What does it mean«| and how do I fix it»?", "What causes \"$error\"?",
    "Write an SQL query that selects the $column of all $table where the $column2 is greater than #1-100.", "Write an SQL query that counts the $table for each $column.",
    "Write an SQL query that sorts the $table by $column«| in descending order».", "Write an SQL statement that creates a table $table with a $column and a $column2.",
    "Write an HTML page «with a list of $table|with a form for a $column and a $column2|with a table of $table|with a heading and a button».", "Write CSS that «centres a box|makes a button blue|puts a border around a table|hides an element».",
    "How do I «rename a file|find a file|delete a folder|count lines|see running processes|copy a folder|change permissions|unzip an archive» «in the terminal|in Linux|with Python»?",
    "How do I «undo a commit|make a branch|merge a branch|clone a repository|see the history|ignore a file» in Git?", "How do I learn $language?", "Compare Python and «JavaScript|Java|C|Go|Rust|Ruby».",
)


def code(rng: random.Random) -> str:
    """One request."""
    if (draw := rng.random()) < 0.45:
        return fill(rng.choice(TASKS), rng, LISTS)
    if draw < 0.65:
        return fill(rng.choice(ON_SNIPPETS) + "```python\n" + rng.choice(SNIPPETS) + "\n```", rng, LISTS)
    return fill(rng.choice(OTHERS), rng, LISTS)
