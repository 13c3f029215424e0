"""Maths: word problems of one to three steps, sums, algebra, fractions, geometry, a little theory."""

from __future__ import annotations

import random

from .slots import fill

LISTS = {
    "name": ("Anna Ben Carla David Eva Felix Grace Hanna Ivan Jonas Kate Liam Maria Nina Oliver Petra Quinn Rosa Samuel "
             "Tara Umar Vera Walter Xenia Yara Zack Amir Bella Chen Dora Emil Fatima George Helen Isaac Julia Karim "
             "Laura Marco Nadia Omar Paula Ravi Sofia Tomas Ursula Victor Wendy Yusuf Zoe").split(),
    "job": ("baker farmer teacher gardener florist carpenter driver fisherman librarian painter tailor cook plumber "
            "shopkeeper potter beekeeper").split(),
    "thing": ("apples oranges pencils stickers marbles books stamps coins cookies eggs flowers balloons cards shells "
              "beads bricks candles pears lemons peaches buttons bottles notebooks tickets tomatoes potatoes muffins "
              "sandwiches toys shirts chairs postcards magnets badges plums walnuts").split(),
    "box": "boxes bags baskets crates jars packets shelves rows trays drawers bins cartons".split(),
    "ware": ("a book|a hat|a lamp|a bag|a ball|a kettle|a mug|a chair|a clock|a coat|a scarf|a board game|a pair of "
             "shoes|a phone case|a plant|a pillow|a blanket|an umbrella|a bicycle|a guitar|a desk|a watch|a radio|a "
             "rug|a sweater|a backpack").split("|"),
    "coin": "dollars euros pounds dollars dollars".split(),
    "place": ("school|the market|the library|a farm|the park|a bakery|the zoo|a factory|the office|a museum|the "
              "station|a hotel|a garden|a cinema|the beach|a camp").split("|"),
    "vehicle": "car bus train truck cyclist boat van motorbike plane ferry".split(),
    "animal": "cows sheep goats ducks chickens horses rabbits pigs geese cats dogs turkeys".split(),
    "work": ("paint a fence|clean the hall|pack the orders|mow a field|build a wall|sort the mail|pick the fruit|wash "
             "the windows|print the books|load a ship").split("|"),
    "drink": "water juice milk lemonade tea soup oil petrol paint syrup".split(),
    "sport": "basketball football tennis swimming hockey volleyball running chess".split(),
    "shape": "triangle square rectangle circle cube sphere cylinder cone trapezoid parallelogram hexagon".split(),
    "unit": ("metres to centimetres|kilometres to metres|hours to minutes|minutes to seconds|kilograms to grams|litres "
             "to millilitres|days to hours|weeks to days|feet to inches|yards to feet|grams to kilograms|centimetres "
             "to metres|minutes to hours|inches to centimetres|miles to kilometres").split("|"),
    "idea": ("a prime number|a fraction|the mean of a list of numbers|the median|the mode|a percentage|a ratio|the area "
             "of a circle|the perimeter of a shape|a square root|an exponent|a negative number|a variable|an equation|a "
             "function|the slope of a line|the Pythagorean theorem|probability|a factor|a multiple|the least common "
             "multiple|the greatest common divisor|place value|rounding|an angle|a right angle|parallel lines|volume|"
             "surface area|a decimal|the order of operations|the distributive property|a quadratic equation|a polynomial|"
             "a set|a sequence|an arithmetic sequence|a geometric sequence|a factorial|a permutation|a combination|a "
             "logarithm|a derivative|an integral|a limit|a vector|a matrix|a proportion|simple interest|compound "
             "interest|symmetry|a coordinate plane|an inequality|absolute value|scientific notation|pi|a proof|standard "
             "deviation|an even number|long division|a mixed number|a reciprocal").split("|"),
    "reader": ("a child|a student|a beginner|somebody who dislikes maths|a ten-year-old|a friend|a class of twelve-year-olds|"
               "my little sister|an adult who has forgotten school").split("|"),
    "letter": "x y n a t z k m".split(),
    "ask": ("||||| Show your work.| Explain step by step.| Show your steps.| Think step by step.| Give the answer at the "
            "end.| Write down the calculation.| Explain your answer.").split("|"),
}

STORIES = (
    "$name has #3-90 $thing and «buys|finds|gets|receives» #2-60 more. How many $thing does $name have «now|in total|altogether»?",
    "$name «had|started with» #40-120 $thing and gave #3-38 of them to $name2. How many $thing are left?",
    "$name has #5-60 $thing. $name2 has #2-30 more than $name. How many $thing do they have together?",
    "$name has #2-9 times as many $thing as $name2. If $name2 has #3-25 $thing, how many does $name have?",
    "There are #3-24 $box with #4-36 $thing in each. How many $thing are there «in all|altogether|in total»?",
    "A $job puts #48-480/12 $thing into $box of «6|12|4|3|2» each. How many $box are needed?",
    "A $job sells #12-80 $thing «in the morning|on Monday» and #12-80 «in the afternoon|on Tuesday», each for #2-9 $coin. How much money does the $job earn?",
    "A $job has #100-400 $thing, sells #10-60 on Monday and twice as many on Tuesday. How many are left?",
    "$ware costs #6-95 $coin. $name buys #2-9 of them. How much does $name pay?",
    "$name buys $ware for #6-60 $coin and $ware2 for #6-60 $coin and pays with a note of «100|200» $coin. How much change does $name get?",
    "$ware costs #20-200/5 $coin. In a sale the price is reduced by #10-50/5%. What is the new price?",
    "The price of $ware rises from #20-80/5 $coin to #85-160/5 $coin. By how many percent did it rise?",
    "$name earns #9-30 $coin an hour and works #3-9 hours a day, #2-6 days a week. How much does $name earn «in a week|in #2-6 weeks»?",
    "$name saves #3-40 $coin «a week|each week|every month». How long does it take to save #100-900/20 $coin?",
    "A $vehicle travels at #20-120/5 km/h for #2-9 hours. How far does it go?",
    "A $vehicle covers #60-600/20 km in #2-8 hours. What is its average speed?",
    "A $vehicle goes #10-60/5 km on the first day and #2-4 times as far on the second day. How far does it go in both days?",
    "$name drives from $place to $place2, a distance of #40-300/10 km, at #40-100/10 km/h. How long does the trip take?",
    "A farmer has #10-60 $animal and #10-60 $animal2. «#2-9 $animal are sold|#3-9 more $animal2 are born». How many animals does the farmer have now?",
    "#2-8 workers can $work in #2-12 days. How long would #2-10 workers need?",
    "$name can $work in #2-8 hours and $name2 in #3-12 hours. How long do they need together?",
    "A «tank|barrel|bottle|bucket» holds #10-90/5 litres of $drink. #3-9 litres are used every day. How many days does it last?",
    "$name drinks #2-6 glasses of $drink a day. How many glasses is that in «a week|#2-9 weeks|the month of June|a year»?",
    "$name reads #8-45 pages a day. How many days does a book of #120-600/10 pages take?",
    "A class of #18-34 students goes to $place. Each ticket costs #3-15 $coin, and the bus costs #60-240/10 $coin. What does the trip cost «in total|for each student»?",
    "There are #120-900/10 people at $place. #10-60/5% of them are children. How many «children|adults» are there?",
    "$name scores #8-30 points in the first game of $sport, #8-30 in the second and #8-30 in the third. What is the average?",
    "$name is #5-40 years old. $name2 is #2-15 years «older|younger» than $name. What is the sum of their ages «in #2-9 years|today»?",
    "In #2-9 years $name will be #12-60 years old. How old was $name #2-6 years ago?",
    "A recipe for #2-6 people needs #100-500/50 g of flour. How much flour is needed for #8-20 people?",
    "$name cuts a rope of #12-90 m into pieces of #2-6 m. How many pieces are there, and what is left over?",
    "«Half|A third|A quarter|A fifth» of the #60-480/60 $thing in a box are red. The rest are blue. How many are blue?",
    "$name gives «half|a third|a quarter» of the #24-240/12 $thing to $name2 and then loses #2-9. How many does $name have left?",
    "A garden is #4-30 m long and #3-20 m wide. What is its «area|perimeter»? «|How much does a fence around it cost at #2-9 $coin a metre?»",
    "A movie starts at #1-8:«10|15|20|30|40|45» and lasts #70-170/5 minutes. When does it end?",
    "$name walks #2-9 km «every day|each morning». How many kilometres is that in #2-12 weeks?",
    "$name, $name2 and $name3 share #30-300/3 $thing equally. How many does each get?",
    "A shop sold #20-90 $thing on Monday, #5-19 fewer on Tuesday and twice as many on Wednesday as on Monday. How many were sold in the three days?",
    "A phone plan costs #8-40 $coin a month plus «10|15|20|25» cents for each message. What does a month with #20-200/10 messages cost?",
    "A bag holds #2-9 red, #2-9 blue and #2-9 green balls. One is drawn without looking. What is the probability that it is «red|blue|green|not red|not blue»?",
    "$name plants #3-15 rows of #4-20 $thing. #5-30 of them do not grow. How many are left?",
    "$name borrows #200-5000/100 $coin at #2-9% simple interest a year. How much interest is due after #2-6 years?",
    "A $vehicle uses #4-12 litres of fuel for 100 km. How much does it need for #150-900/50 km?",
)

BARE = (
    "«What is|Calculate|Compute|Work out|How much is» #11-999 «+|-|+|-|plus|minus» #11-999?",
    "«What is|Calculate|Compute|Work out» #3-99 «*|x|times|multiplied by» #3-99?",
    "«What is|Calculate|Compute» #24-990/6 «/|divided by» «2|3|6»?",
    "«What is|Evaluate|Calculate» (#2-30 + #2-30) * #2-12 «- #2-40|+ #2-40|»?",
    "«What is|Evaluate|Simplify» #2-20 + #2-20 * #2-12 - #2-20?",
    "What is #5-95/5% of #20-900/10?",
    "#3-60 is what percent of #80-400/20?",
    "Solve for $letter: #2-12$letter «+|-» #1-40 = #41-120.$ask",
    "Solve for $letter: #8-15$letter «+|-» #1-20 = #2-7$letter + #21-80.$ask",
    "Solve for $letter: #2-9($letter «+|-» #1-12) = #12-90.$ask",
    "Solve the equation $letter/#2-9 «+|-» #1-12 = #13-30.$ask",
    "Solve the inequality #2-9$letter «+|-» #1-20 «<|>» #21-80.",
    "Solve the system of equations: $letter + $letter2 = #20-60 and $letter - $letter2 = #2-18.$ask",
    "Solve $letter^2 «+|-» #2-12$letter «+|-» #1-30 = 0.$ask",
    "Expand («x|2x|3x» «+|-» #1-9)(x «+|-» #1-9).",
    "Factor «x^2|y^2» «+|-» #3-12«x|y» «+|-» #2-30.",
    "«What is|Find» the derivative of #2-9x^#2-6 «+|-» #2-9x«^2|» + #1-9?",
    "Find the integral of #2-12x^#2-5 «+|-» #2-9x.",
    "Write «#2-9|1»/«12|15|20|24|30|36» as a decimal and as a percentage.",
    "«Add|Subtract|Multiply|Divide» the fractions #2-7/«8|9|10» and #1-4/«5|6|7».$ask",
    "Simplify the fraction #6-60/6/#66-180/6.",
    "What is the «greatest common divisor|least common multiple» of #12-96/4 and #10-120/5?",
    "«Is #51-499/2 a prime number?|List the factors of #24-180/6.|Find the prime factorisation of #36-360/12.»$ask",
    "What is the «square root of «49|64|81|100|121|144|169|196|225|256|400|625»|square of #11-40|cube of #3-15»?",
    "What is the next number in the sequence #1-9, #10-14, #15-19, #20-24? Explain why.",
    "Find the «#5-30th» term of the arithmetic sequence that starts with #1-20 and goes up by #2-9.",
    "What is the sum of the numbers from 1 to #20-400/10?",
    "Round #100-999.#11-99 to the nearest «whole number|tenth|ten|hundred».",
    "Convert #2-60 «|.5 »$unit.",
    "«What is the area of|Calculate the area of» a «rectangle with sides #3-40 cm and #3-40 cm|triangle with base #4-40 cm and height #3-30 cm|circle with radius #2-20 cm|square with side #3-30 m»?",
    "«What is the volume of» a «cube with side #2-15 cm|box of #2-20 cm by #2-20 cm by #2-20 cm|cylinder with radius #2-10 cm and height #3-30 cm|sphere with radius #2-12 cm»?",
    "The two legs of a right triangle are #3-20 cm and #3-20 cm. How long is the hypotenuse?",
    "Two angles of a triangle are #20-80 and #20-80 degrees. What is the third?",
    "The perimeter of a square is #12-200/4 cm. What is its area?",
    "The mean of #3-8 numbers is #5-40. What is their sum?",
    "Find the mean and the median of #2-20, #2-20, #21-30, #31-40 and #2-40.",
    "How many ways are there to «arrange #3-8 books on a shelf|choose #2-4 people out of #5-12|order #3-7 runners»?",
    "«A coin is flipped #2-5 times. What is the probability of getting only heads?|A die is rolled twice. What is the probability that the sum is #3-11?»",
    "Evaluate f(#2-12) for f(x) = #2-9x^2 «+|-» #2-12x + #1-20.",
    "What is the slope of the line through (#1-9, #1-9) and (#10-20, #10-30)?$ask",
    "If $letter = #2-12 and $letter2 = #2-12, what is #2-9$letter + #2-9$letter2?",
    "Put these numbers in order from smallest to largest: #10-99, #100-400, #1-9, #10-99, #30-300.",
    "What is 2^#3-14?", "What is log base 10 of «10|100|1000|10000|100000|0.1|0.01»?",
    "Write the number #1000-99999 «in words|in expanded form|in scientific notation».",
    "Convert #5-250 to «binary|hexadecimal|base 8».",
)

IDEAS = (
    "What is $idea?", "Explain «|to $reader »what $idea is.", "Explain $idea «in simple words|with an example|in one paragraph|in two sentences».",
    "Give «three|two|five|a few» examples of how $idea is used in everyday life.", "Write «three|two|five» practice questions about $idea«, with answers|».",
    "What is the difference between $idea and $idea2?", "How do you find the «area|perimeter|volume» of a $shape?",
    "Describe the properties of a $shape.", "How can I remember what $idea is?", "Why is $idea useful?",
    "Make up a word problem about $place «with|that needs» $idea and solve it.",
)


def maths(rng: random.Random) -> str:
    """One question."""
    if (draw := rng.random()) < 0.55:
        return fill(rng.choice(STORIES) + "$ask", rng, LISTS)
    return fill(rng.choice(BARE if draw < 0.87 else IDEAS), rng, LISTS)
