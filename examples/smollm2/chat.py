"""Chat: questions about the world, advice, small texts to write, lists, plans, rewriting."""

from __future__ import annotations

import random

from .slots import fill

LISTS = {
    "topic": ("gravity|photosynthesis|the water cycle|electricity|volcanoes|earthquakes|the moon|the solar system|black holes|"
              "stars|magnets|sound|light|heat|friction|atoms|molecules|the human heart|the lungs|the brain|the immune system|"
              "digestion|sleep|dreams|DNA|evolution|dinosaurs|fossils|bees|ants|whales|dolphins|sharks|birds|bats|spiders|"
              "snakes|frogs|trees|mushrooms|deserts|rainforests|oceans|rivers|glaciers|clouds|rain|lightning|rainbows|"
              "hurricanes|climate change|recycling|solar energy|wind power|nuclear power|batteries|engines|aeroplanes|"
              "rockets|satellites|telescopes|microscopes|the internet|computers|robots|artificial intelligence|"
              "smartphones|television|radio|printing|paper|glass|steel|plastic|cotton|silk|chocolate|coffee|tea|bread|"
              "cheese|salt|sugar|honey|rice|potatoes|tomatoes|the Roman Empire|ancient Egypt|ancient Greece|the Middle "
              "Ages|the Renaissance|the Industrial Revolution|the French Revolution|the Silk Road|the Vikings|the Great "
              "Wall of China|the pyramids|castles|democracy|elections|the United Nations|money|banks|taxes|insurance|the "
              "stock market|supply and demand|advertising|museums|libraries|theatre|opera|jazz|classical music|the piano|"
              "the guitar|painting|photography|poetry|novels|fairy tales|myths|football|tennis|the Olympic Games|swimming|"
              "yoga|meditation|memory|habits|emotions|friendship|language|alphabets|maps|time zones|calendars|clocks|"
              "bridges|skyscrapers|trains|bicycles|ships|lighthouses|gardens|compost|pets|dogs|cats|horses|allergies|"
              "vitamins|exercise|blood|bones|muscles|the skin|the eyes|hearing|taste|germs|soap|antibiotics").split("|"),
    "person": ("Isaac Newton|Albert Einstein|Marie Curie|Charles Darwin|Galileo Galilei|Leonardo da Vinci|William Shakespeare|"
               "Jane Austen|Mozart|Beethoven|Frida Kahlo|Vincent van Gogh|Cleopatra|Julius Caesar|Alexander the Great|Joan "
               "of Arc|Napoleon|Abraham Lincoln|Mahatma Gandhi|Nelson Mandela|Rosa Parks|Florence Nightingale|Alan Turing|"
               "Grace Hopper|Nikola Tesla|Thomas Edison|the Wright brothers|Neil Armstrong|Amelia Earhart|Confucius|"
               "Socrates|Aristotle|Plato|Christopher Columbus|Marco Polo|Charlie Chaplin|Pablo Picasso|Louis Pasteur|"
               "Alexander Fleming|Johannes Gutenberg|Martin Luther King|Queen Victoria|Katherine Johnson|Archimedes").split("|"),
    "country": ("France|Germany|Italy|Spain|Portugal|Greece|Norway|Sweden|Finland|Poland|Austria|Ireland|Scotland|Turkey|"
                "Egypt|Morocco|Kenya|South Africa|Nigeria|India|China|Japan|South Korea|Thailand|Vietnam|Indonesia|"
                "Australia|New Zealand|Canada|Mexico|Brazil|Argentina|Chile|Peru|Colombia|Iceland|the Netherlands|Belgium|"
                "Denmark|Hungary|Ukraine|Israel|Iran|Pakistan|the Philippines|Cuba").split("|"),
    "city": ("Paris|London|Rome|Berlin|Madrid|Vienna|Prague|Amsterdam|Athens|Istanbul|Cairo|Tokyo|Kyoto|Seoul|Sydney|New York|"
             "Chicago|San Francisco|Toronto|Mexico City|Lima|Barcelona|Dublin|Edinburgh|Copenhagen|Stockholm|Oslo|Helsinki|"
             "Budapest|Singapore|Bangkok|Mumbai|Marrakesh|Venice|Florence|Naples").split("|"),
    "skill": ("playing the guitar|cooking|drawing|swimming|public speaking|writing|photography|gardening|chess|running|"
              "knitting|baking|time management|typing|singing|dancing|juggling|saving money|speaking in meetings|reading "
              "faster|sewing|painting|remembering names|listening|negotiating|driving|cycling|cleaning|budgeting").split("|"),
    "problem": ("I cannot fall asleep at night|I am always late|I feel tired after lunch|my houseplant has yellow leaves|my "
                "phone battery runs out too fast|I am nervous before exams|I forget what I read|my neighbour is noisy|my "
                "desk is always messy|I spend too much on food|I get bored at work|my dog barks at visitors|my cat "
                "scratches the furniture|my bread does not rise|my laptop is slow|I have a cold|I have too many e-mails|I "
                "am homesick|I argue with my brother|I put things off until the last moment|my shoes smell|I am afraid of "
                "flying|my child does not like vegetables|I want to drink less coffee|I lost my keys|my back hurts after "
                "sitting|I do not know what to cook|I moved to a new city and know nobody|my bike squeaks|I miss deadlines|"
                "I cannot decide what to study|my garden is full of weeds|I snore|I look at my phone too much").split("|"),
    "event": ("a birthday party|a wedding|a picnic|a school fair|a family reunion|a job interview|a camping trip|a move to "
              "another flat|a dinner with six guests|a long flight|a road trip|a book club|a garage sale|a farewell party|a "
              "day at the beach|a team meeting|a quiz night|a baby shower|an exam|a marathon|a rainy weekend|a job fair").split("|"),
    "hero": ("a dragon who is afraid of fire|a lost robot|a girl who can talk to birds|an old sailor|a shy mouse|a baker|a clock "
             "that runs backwards|two brothers in the forest|a detective|a snowman in spring|a young inventor|a talking "
             "tree|a bus driver|a cat who lives in a library|a lonely star|a knight without a horse|a gardener and a fox|"
             "an astronaut|a painter who lost a colour|a boy with a magic pencil|a grandmother and her radio|a violin|a "
             "penguin who wants to fly|a teacher|a ghost|a wolf|a small boat|a mayor|a twin|a king who cannot sleep").split("|"),
    "theme": ("autumn|the sea|rain|a river|friendship|the moon|home|winter|a cat|morning|hope|a garden|the wind|time|a journey|"
              "music|night|spring|a train|silence|my mother|summer|the stars|coffee|a tree|the city|memory|bread").split("|"),
    "dish": ("pancakes|tomato soup|fried rice|an omelette|lentil stew|pasta with vegetables|a fruit salad|roast potatoes|apple pie|"
             "pizza dough|hummus|a bean salad|banana bread|chicken curry|vegetable soup|scrambled eggs|tacos|porridge|a "
             "sandwich|mashed potatoes|guacamole|a green smoothie|rice pudding|grilled fish|chocolate cake|oatmeal cookies|"
             "potato salad|stuffed peppers|risotto|onion soup").split("|"),
    "pair": ("cats and dogs|tea and cocoa|books and films|trains and planes|the city and the countryside|summer and winter|a "
             "laptop and a tablet|butter and margarine|a frog and a toad|a crocodile and an alligator|a violin and a viola|"
             "a novel and a short story|a comet and an asteroid|bacteria and viruses|a planet and a star|renting and "
             "buying a home|a salad and a soup|running and walking|a debit card and a credit card|rabbits and hares|jam and "
             "jelly|a violin and a guitar|cardio and strength training|a virus and a worm in computing|yoga and pilates|a "
             "college and a university|empathy and sympathy|an opinion and a fact|wool and cotton|whales and fish").split("|"),
    "firm": ("a coffee shop|a bookshop|a bicycle repair shop|a flower shop|a dog-walking service|a gym|a toy store|a "
             "vegetarian restaurant|a language school|a travel agency|a hair salon|an ice cream van|a music school|a "
             "cleaning company|a garden centre|a board game café|a photography studio|a hotel for cats").split("|"),
    "receiver": "my boss|a colleague|my teacher|a customer|my neighbour|a friend|my aunt|the bank|a hotel|my doctor|an airline|a client".split("|"),
    "aim": ("thanking for a gift|asking for a day off|cancelling an appointment|asking for a refund|apologising for being late|"
            "inviting to dinner|asking for help with a project|reporting a lost parcel|asking about opening hours|"
            "congratulating on a new job|confirming a meeting|declining an invitation|asking for a recommendation|"
            "complaining about a delay|offering help|saying goodbye|asking for a change of date|introducing myself").split("|"),
    "reader": ("a child|a beginner|a ten-year-old|a student|my grandmother|a teenager|a friend|somebody in a hurry|a curious adult|"
               "a class").split("|"),
    "tone": "funny|sad|short|simple|cheerful|serious|strange|gentle|exciting".split("|"),
    "number": "two three three four five five six".split(),
    "plain": ("The meeting is cancelled and nobody told me.|Your idea is bad.|I want my money back.|This food is cold.|You forgot my "
              "birthday.|Send me the file now.|We cannot help you.|The bus was late and I was angry.|He run to the shop "
              "yesterday.|She don't like coffee.|Me and him went to the park.|The weather is nice today.|There house is very "
              "big.|I has two cats.|The dog barked loudly at the man.|The film was long but good.|We are closing the shop.|I "
              "didn't do nothing.|Its a beautiful day.|The children was playing.").split("|"),
    "style": ("more polite|shorter|in the past tense|as a question|in formal English|in simple words|more exciting|correctly|in the "
              "future tense|as a headline").split("|"),
    "word": ("happy|big|fast|small|angry|beautiful|smart|cold|easy|difficult|tired|brave|quiet|strange|old|important|funny|good|bad|"
             "rich|clean|dark|kind|strong|lazy|careful|honest|famous|empty|loud").split("|"),
    "proverb": ("actions speak louder than words|practice makes perfect|better late than never|a stitch in time saves nine|don't "
                "judge a book by its cover|two heads are better than one|when in Rome, do as the Romans do|no pain, no gain|"
                "the grass is always greener on the other side|every cloud has a silver lining|a penny saved is a penny "
                "earned|honesty is the best policy|look before you leap|many hands make light work|time is money").split("|"),
    "animal": ("elephant|lion|giraffe|penguin|owl|kangaroo|octopus|wolf|bear|tiger|turtle|butterfly|eagle|camel|crocodile|horse|koala|"
               "panda|fox|hedgehog|squirrel|salmon|parrot|zebra|rabbit|jellyfish|moose|seal").split("|"),
}

PROMPTS = (
    "What «is|are» $topic?", "Explain $topic to $reader.", "Tell me about $topic.", "How do scientists study $topic?",
    "«Give me|List|Name» $number «interesting |surprising |»facts about $topic.", "Why «is|are» $topic important?",
    "Write a «short|brief» paragraph about $topic.", "What should «I|everybody» know about $topic?",
    "Explain $topic in «one sentence|simple terms|three sentences|two paragraphs».", "Write $number quiz questions about $topic«, with answers|».",
    "What is the history of $topic?", "How «does|do» $topic affect our lives?", "Summarise what is known about $topic in «three|four|five» sentences.",
    "What are common mistakes people make about $topic?", "I am writing an essay about $topic. Give me an outline.",
    "How are $topic and $topic2 connected?", "Who was $person?", "What is $person «known|famous|remembered» for?",
    "Write a short biography of $person.", "What would $person say about $topic?", "What can we learn from $person?",
    "What is the capital of $country?", "Tell me about the «food|culture|history|geography|climate|music» of $country.",
    "What language«s|» do people speak in $country?", "What should I see in $country?", "Name $number «famous places|typical dishes|traditions» in $country.",
    "I have «two|three|four» days in $city. What should I do?", "Plan a day in $city for «a family|a student|somebody who likes art|two friends|a rainy day».",
    "What is the best way to get around in $city?", "Is $city or $city2 better for a short holiday?",
    "How can I get better at $skill?", "Give me $number tips for $skill.", "I want to start $skill. Where do I begin?",
    "Make a plan for learning $skill in «a month|four weeks|a week|three months».", "What are the benefits of $skill?",
    "$problem. What can I do?", "$problem. «Give me|Can you give me» $number «tips|ideas|suggestions»«.|?»", "Help me: $problem.",
    "How do I prepare for $event?", "Make a «checklist|to-do list|plan» for $event.", "What should I bring to $event?",
    "Give me $number ideas for $event.", "What should I wear to $event?", "What can go wrong at $event, and how do I avoid it?",
    "Write a «$tone |»story about $hero.", "Write the beginning of a «$tone |»story about $hero.", "Invent a title for a story about $hero.",
    "Write a «$tone |»story about $hero «in five sentences|in one paragraph|with a happy ending|with a surprising ending|for children|set in $city».",
    "Write a «$tone |»poem about $theme.", "Write a haiku about $theme.", "Write «four|six|two» lines about $theme «that rhyme|».",
    "Write a song about $theme.", "Describe $theme without using the word itself.",
    "How do I make $dish?", "Give me a «simple|quick|cheap|healthy» recipe for $dish.", "What can I serve with $dish?",
    "What ingredients do I need for $dish?", "How long does it take to make $dish?",
    "What is the difference between $pair?", "Compare $pair.", "Which is better: $pair? «|Explain why.»",
    "Invent $number names for $firm.", "Write an advertisement for $firm.", "Write a slogan for $firm.", "How do I start $firm?",
    "What does $firm need to attract customers in $city?",
    "Write «an e-mail|a message|a short letter|a note» to $receiver, $aim.", "How do I tell $receiver politely that I «am busy|cannot come|made a mistake|disagree|need more time»?",
    "Rewrite this sentence $style: \"$plain\"", "«Correct|Check» the grammar: \"$plain\"", "Translate into «Spanish|French|German|Italian»: \"$plain\"",
    "«Give me|List» $number synonyms for \"$word\".", "What is the opposite of \"$word\"?", "Use the word \"$word\" in $number sentences.",
    "Use the words \"$word\" and \"$word2\" in one sentence.", "What does \"$proverb\" mean?", "Explain the proverb \"$proverb\" «to $reader|with an example».",
    "What does «a|the» $animal eat?", "Where does a $animal live?", "Describe «a|the» $animal.", "Tell me a joke about a $animal«| and a $animal2».",
    "What is the difference between a $animal and a $animal2?", "Write a riddle whose answer is \"$animal\".",
    "Could a $animal and a $animal2 be friends? Write a short dialogue.", "Hello! Can you help me with $skill?", "Good morning! What can you tell me about $topic?",
    "Do you think $topic will change in the next fifty years?", "Let's talk about $topic. What do you find interesting?",
    "Argue for and against $skill «as a hobby|at school|at work».", "What are the pros and cons of $skill?",
    "Is it true that $topic «is|are» often misunderstood?", "Recommend $number books about $topic.", "What job would suit somebody who likes $skill and $topic?",
    "Give me a daily routine for somebody who wants to learn about $topic.", "Sort these words alphabetically: $word, $word2, $word3, $word4.",
    "Classify these as animal, food or place: $animal, $dish, $city, $animal2, $country.", "Write a diary entry by $hero.",
    "Write a conversation between $hero and $hero2.", "Write a speech of one minute about $topic.", "Make up a question about $topic and answer it.",
)


def chat(rng: random.Random) -> str:
    """One message."""
    return fill(rng.choice(PROMPTS), rng, LISTS)
