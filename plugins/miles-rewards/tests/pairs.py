"""Answers, labels and rows such as models and datasets write, drawn by number: the same ones on every machine.

Only random.Random's bits are used, whose sequence Python promises to keep.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

COUNT = 2500


class Pair(NamedTuple):
    """An answer and what it is compared with."""

    response: str
    label: str | None
    row: dict[str, Any]


class Draws(random.Random):
    """Draws that every Python makes alike."""

    def one(self, options: Sequence[Any]) -> Any:
        return options[int(self.random() * len(options))]

    def number(self, low: int, high: int) -> int:
        return low + int(self.random() * (high - low + 1))

    def chance(self, share: float) -> bool:
        return self.random() < share


def pairs(kind: str) -> list[Pair]:
    """All pairs of a scorer."""
    return [KINDS[kind](Draws(f"{kind} {number}")) for number in range(COUNT)]


def digest(drawn: Sequence[Pair]) -> str:
    """What tells whether two lists of pairs are the same."""
    return hashlib.sha256(json.dumps(drawn, ensure_ascii=True).encode()).hexdigest()


# Mathematical answers: each drawn as spellings that mean the same, of which one is the label.


def _integer(draw: Draws) -> list[str]:
    value = draw.number(-99, 5000) * draw.one((1, 1, 1000))
    return [f"{value}", f"{value:,}", f"{value}.0", f"{value}.", f"${value}$", f"{value:,}".replace(",", r",\!"),
            rf"\text{{{value}}}", rf"{value}\text{{ cm}}", rf"{value} \text{{ apples}}", rf"{value}^\circ",
            f"x={value}",
            rf"x = {value}", rf"\${value}", rf"{value}\%", f"{value}%", f"{value} degrees", f"{value} meters",
            f" {value} ",
            f"{{{value}}}", rf"\left({value}\right)", f"+{value}", f"{value}cm^2", f"0{value}",
            rf"{value}\text{{cm}}^2",
            f"{value:,}".replace(",", "{,}"), f"{value - 1}+1", rf"\mathbf{{{value}}}", f"{value}\n",
            rf"{value}\,"]  # fmt: skip


def _fraction(draw: Draws) -> list[str]:
    top, bottom = draw.number(1, 30), draw.number(2, 12)
    minus = draw.one(("", "", "-"))
    return [rf"{minus}\frac{{{top}}}{{{bottom}}}", f"{minus}{top}/{bottom}", rf"{minus}\dfrac{{{top}}}{{{bottom}}}",
            rf"{minus}\tfrac{{{top}}}{{{bottom}}}", rf"{minus}\frac{top % 10}{bottom % 10}",
            f"{minus}{top / bottom:.6g}",
            rf"{minus}\frac{{{2 * top}}}{{{2 * bottom}}}", f"{minus}{2 * top}/{2 * bottom}",
            rf"\frac{{{minus}{top}}}{{{bottom}}}",
            rf"{minus}{top // bottom}\frac{{{top % bottom}}}{{{bottom}}}",
            f"{minus}{top // bottom} {top % bottom}/{bottom}",
            rf"{minus}\frac{{{top}}}{bottom % 10}", rf"{minus}({top}/{bottom})", rf"{minus}{top} \div {bottom}",
            rf"\displaystyle {minus}\frac{{{top}}}{{{bottom}}}", rf"{minus}\frac {{{top}}} {{{bottom}}}",
            rf"{minus}{top}\over{bottom}"]  # fmt: skip


def _decimal(draw: Draws) -> list[str]:
    value = draw.number(1, 999) / draw.one((10, 100, 1000))
    return [f"{value}", f"{value}".lstrip("0") or "0", f"{value:.4f}", f"{value}0", rf"{value}\text{{ m}}",
        rf"\${value}",
            f"{value * 100:g}\\%", f"{value:.1e}", f"{value}$", rf"\approx {value}", f"-{value}",
            f"{value}".replace(".", ","),
            f"{int(value * 1000)}/1000", rf"\frac{{{int(value * 1000)}}}{{1000}}", f"0{value}"]  # fmt: skip


def _root(draw: Draws) -> list[str]:
    factor, inside = draw.number(2, 9), draw.one((2, 3, 5, 7, 12))
    return [rf"{factor}\sqrt{{{inside}}}", rf"{factor}\sqrt{inside % 10}", rf"{factor} \sqrt{{{inside}}}",
        f"{factor}*sqrt({inside})",
            rf"\sqrt{{{factor * factor * inside}}}", rf"\sqrt{{{inside}}}\cdot {factor}",
            rf"{factor}\times\sqrt{{{inside}}}",
            rf"{factor}{inside}^{{1/2}}", rf"\frac{{{factor * inside}}}{{\sqrt{{{inside}}}}}", f"{factor}√{inside}",
            r"\sqrt", rf"{factor}\sqrt[3]{{{inside}}}"]  # fmt: skip


def _formula(draw: Draws) -> list[str]:
    a, b = draw.number(2, 9), draw.number(1, 20)
    return draw.one((
        [rf"{a}\pi", rf"{a} \pi", f"{a}*pi", f"{a}π", rf"\pi {a}", rf"\pi\cdot {a}", rf"{2 * a}\pi/2",
            f"{a * 3.14159:.2f}"],
        [f"{a}x+{b}", f"{b}+{a}x", f"{a}*x+{b}", rf"{a}x + {b}", f"y={a}x+{b}", f"{a}(x+{b}/{a})", rf"{a}\cdot x+{b}",
            f"{a}t+{b}"],
        [f"x^2+{b}", f"{b}+x^2", rf"x^{{2}}+{b}", f"x*x+{b}", f"x**2+{b}", f"(x)^2+{b}", f"X^2+{b}"],
        [f"({a}, {b})", f"({a},{b})", rf"\left({a},{b}\right)", f"[{a},{b}]", f"({b},{a})", f"({a};{b})", f"{a},{b}",
            f"({a}.0,{b})", rf"(x,y)=({a},{b})"],
        [f"[{a},{a + b})", rf"[{a}, {a + b})", rf"\left[{a},{a + b}\right)", f"({a},{a + b})", rf"x\in[{a},{a + b})",
            rf"{a}\le x<{a + b}"],
        [rf"(-\infty,{a})", rf"(-\infty, {a})", f"(-inf,{a})", f"(-∞,{a})", rf"(-\infty,{a}]",
            rf"(-\infty,{a})\cup({a},\infty)"],
        [f"{a}, {b}", f"{a} and {b}", f"{a} or {b}", f"{b}, {a}", rf"\{{{a},{b}\}}", rf"{a} \text{{ and }} {b}",
            f"x={a},{b}", rf"\{{{a}, {b}\}}"],
        [f"{a} million", f"{a}000000", rf"{a} \text{{ million}}", rf"{a}\times10^6", rf"{a} \cdot 10^{{6}}",
            f"{a},000,000"],
        [f"{a}^{{{b}}}", f"{a}^{b}", f"{a}**{b % 5}", f"{a}^({b})", str(a**(b % 5))],
        [rf"{a}:{b % 24}0", rf"{a}:{b % 24}0 \text{{ PM}}", f"{a}:{b % 24}0 pm", rf"{a}\!:\!{b % 24}0"],
        [rf"\begin{{pmatrix}}{a}\\{b}\end{{pmatrix}}", rf"\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}",
            rf"\begin{{bmatrix}}{a}\\{b}\end{{bmatrix}}"],
        [f"{a}+{b}i", f"{b}i+{a}", f"{a} + {b} i", rf"{a}+{b}\mathrm{{i}}", f"{a}-{b}i", f"i{b}+{a}"],
    ))  # fmt: skip


def _words(draw: Draws) -> list[str]:
    word = draw.one(("even", "Tuesday", "Evelyn", "no solution", "B", "D", "正方形", "straße", "odd", "True", "km/h"))
    return [word, rf"\text{{{word}}}", rf"\textbf{{{word}}}", rf"\text{{({word})}}", f"({word})", word.upper(),
        word.lower(), f"{word}.",
            rf"\mathrm{{{word}}}", rf"\text{{ {word}}}", f" {word}", f"{word[:-1]}", rf"\text{{{word}}} ",
            rf"\mbox{{{word}}}"]  # fmt: skip


def _broken(draw: Draws) -> list[str]:
    return ["", " ", r"\frac", r"\frac{1}{", "{", r"\{", r"\text{ a}\text{ b}", "1/0", "((((", "=", "x==2", r"\\",
        "\x00", r"\frac1", "%", "?",
            r"\sqrt{}", "a b c d", r"\text{}", ",", "()", "[1", "−5", "½", "٣", "1_000", "nan", "inf", "1e400",
            "\ud83d", "e", "i", "I",
            r"\boxed", "import os", "().__class__", "lambda: 1", "2 2", "--3", "$$", r"5\text{ and }6", "1,23",
            "12,345,67"]  # fmt: skip


def _spellings(draw: Draws) -> list[str]:
    forms = (_integer, _integer, _integer, _fraction, _fraction, _decimal, _root, _formula, _formula, _formula,
        _words, _broken)
    return draw.one(forms)(draw)  # type: ignore[no-any-return]


def _answer_and_label(draw: Draws) -> tuple[str, str]:
    """Mostly two spellings of one value; else of values of one kind, or of two kinds."""
    spellings = _spellings(draw)
    if draw.chance(0.12):
        return draw.one(_spellings(draw)), draw.one(spellings)
    return draw.one(spellings), draw.one(spellings) if draw.chance(0.6) else spellings[0]


def _in_box(draw: Draws, answer: str) -> str:
    other = draw.one(("3", r"\frac{1}{2}", "x"))
    forms = [rf"The answer is $\boxed{{{answer}}}$."] * 10 + [
        rf"\boxed{{{answer}}}", rf"\[\boxed{{{answer}}}\]", rf"\boxed{{{other}}} then \boxed{{{answer}}}",
        rf"\boxed{{{answer}}} but \boxed{{{other}}}", rf"\boxed{{{answer}", rf"\boxed{{{other}}} so \boxed{{{answer}",
        rf"\boxed{{\boxed{{{answer}}}}}", rf"\boxed {{{answer}}}", rf"\fbox{{{answer}}}", rf"\boxed{{x = {answer}}}",
        f"The answer is {answer}.", rf"\boxed{{{answer}}}<|im_end|>", rf"**\boxed{{{answer}}}**", rf"\boxed {answer}",
        rf"\boxed{{{{{answer}}}}}", rf"\boxed{{{answer}}} {{and}} }}", rf"\boxed{{\text{{{answer}}}}}", "",
        rf"\boxed{{ {answer} }}"]  # fmt: skip
    return draw.one(forms)  # type: ignore[no-any-return]


def deepscaler(draw: Draws) -> Pair:
    answer, label = _answer_and_label(draw)
    boxed = _in_box(draw, answer)
    thought = draw.one(("<think>Let me see: \\boxed{7}?</think>\n", "so</think>", "<think>a</think> b </think>",
        "</think>"))
    response = draw.one([thought + boxed] * 12 + [f"###Response\n{boxed}", f"a###Response {boxed} ###Response c",
        boxed])
    return Pair(response, rf"\boxed{{{label}}}" if draw.chance(0.08) else label, {})


def gemma_math(draw: Draws) -> Pair:
    answer, label = _answer_and_label(draw)
    thought = draw.one(("", "<|channel>thought\n\\boxed{9}<channel|>", "<channel|>a<channel|>"))
    return Pair(thought + _in_box(draw, answer), label, {})


def dapo(draw: Draws) -> Pair:
    label = draw.one((str(draw.number(-50, 3000)),) * 60 + (f"{draw.number(0, 99)}.0", f"{draw.number(1, 9)},000",
                     rf"\text{{{draw.number(0, 99)}}}", f"${draw.number(0, 99)}$", "", "x+1",
                     f"{draw.number(0, 9)}.7"))  # fmt: skip
    value = label if draw.chance(0.8) else str(draw.number(0, 9))
    forms = [value] * 6 + [f"${value}$", rf"\boxed{{{value}}}", rf"$\boxed{{{value}}}$", f"{value}.", f"{value}.0",
        rf"\text{{{value}}}", rf"x = {value}",
             rf"{value}\text{{ cm}}", f"{value} dollars", f"{value}%", rf"\${value}", f"{value} degrees",
             rf"{value}^\circ", rf"\frac{{{value}}}{{1}}",
             r"\frac12", r"\sqrt2", f"**{value}**", f"a {value}", f"{value} and 7", f'"{value}"',
             f"{value}<|im_end|>", "", "  ", "１２", rf"\({value}\)",
             f"the number {value}", rf"\overline{{{value}}}", rf"\textbf{{{value}}}", f"{value[:1]},{value[1:]}",
             f"$a$ {value} $b$", f"0{value}", f"{value}=7"]  # fmt: skip
    answer = draw.one(forms)
    line = draw.one(("Answer: ",) * 6 + ("answer:", "ANSWER :\n", "Answer ", "The final answer: ", "**Answer:** ",
        "Answer:\t", "답: ", "Answer: 7\nAnswer: "))
    before = draw.one(("Thus we add.\n", "", "x " * 100, "Answer: 5 is wrong.\n", "é" * 290))
    return Pair(before + line + answer + draw.one(("",) * 6 + ("\nDone.", " ." * 140, "\n\nAnswer", " \n")), label, {})


WORDS = ("the", "a", "an", "Paris", "capital", "France", "of", "is", "Yes", "no", "noanswer", "in", "1889", "Tower.",
    "Eiffel", "naïve", "東京", "U.S.A.",
         "it's", "co-op", "—", "!", "red", "blue", "green", "The")  # fmt: skip


def f1(draw: Draws) -> Pair:
    label = [draw.one(WORDS) for _ in range(draw.one((0,) + (1, 1, 1, 2, 3, 4, 6) * 6))]
    answer = [word for word in label if draw.chance(0.7)] + [draw.one(WORDS) for _ in range(draw.one((0, 0, 1, 2, 8)))]
    said = draw.one((" ", " ", ", ", "\n")).join(answer)
    return Pair(draw.one((said, said, said.upper(), f"{said}.", f"\\boxed{{{said}}}")), " ".join(label), {})


TEXTS = ("Carbon dioxide", "42 kJ/mol", "10^-4 eV", "β-carotene", "It depends", "A and C", "Ca", "none of the above",
    "", "5")


def gpqa(draw: Draws) -> Pair:
    letters = "ABCDEFGHIJ"[: draw.one((4, 4, 4, 5, 8, 10))]
    right = draw.one(letters)
    letter = right if draw.chance(0.55) else draw.one("ABCDEFGHIJKZ")
    choices = [f"{draw.one(TEXTS)}{'' if draw.chance(0.3) else ' ' + one}" for one in letters]
    text = choices["ABCDEFGHIJ".index(letter)] if letter in letters else "something else"
    forms = [f"The answer is {letter}.", f"Answer: {letter}", f"answer is ({letter})", f"**Answer: {letter}**",
        f"\\boxed{{{letter}}}", letter,
             letter.lower(), f"({letter})", f"Option {letter} fits.", f"choice{letter}", f"{letter} is correct",
                 f"{letter} is the correct option",
             f"Final answer: {letter}", f"I think the answer is important. Final answer: {letter}",
             f"The answer is: {text}", text, text.lower(),
             f"I pick {letter}", "A, B and C are wrong", f"The correct answers are many; {letter}.", "", "no idea",
             f"<think>Answer: A</think>{letter}",
             f"<think>Answer: {letter}", f"答案是 {letter}", f"Answer\n\n{letter}", f"Answer  is   {letter}",
             f"ANSWER IS {letter}!", f"{letter})", "I am sure.",
             f"The answer is not A. It is {letter}", f"answer: option {letter}", f"Answer: ${letter}$"]  # fmt: skip
    row: dict[str, Any] = {}
    if draw.chance(0.6):
        row["choices"] = choices if draw.chance(0.8) else dict(zip(letters, choices))
    if draw.chance(0.3):
        row["valid_letters"] = list(letters.lower() if draw.chance(0.3) else letters)
    if draw.chance(0.3):
        row["correct_letter"] = draw.one((right, right.lower(), f" {right} ", "", "Z"))
    if draw.chance(0.2):
        row[draw.one(("correct_answer", "answer_text"))] = choices[letters.index(right)]
    label = draw.one((right, right, right, right.lower(), f" {right}", choices[letters.index(right)],
        choices[letters.index(right)].upper(), "", f"{right})"))
    return Pair(draw.one(forms), label, row)


def random_hash(draw: Draws) -> Pair:
    tokens = [draw.number(0, 150000) for _ in range(draw.number(0, 40))]
    return Pair("".join(draw.one(("a", "é", "東", " ", "\n", "7", "\\")) for _ in range(draw.number(0, 30))), None,
        {"tokens": tokens})


def boxed(inner: Callable[[Draws], Pair]) -> Callable[[Draws], Pair]:
    """What a boxed_ scorer grades."""

    def drawn(draw: Draws) -> Pair:
        pair = inner(draw)
        said = pair.response
        forms = [rf"so \boxed{{{said}}}"] * 4 + [rf"\boxed{{x}} \boxed{{{said}}}", rf"\boxed{{{said}", said,
                                                 rf"\boxed{{\text{{{said}}}}} and {{}}"]  # fmt: skip
        return pair._replace(response=draw.one(forms))

    return drawn


INSTRUCTIONS: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    ("count:word_count_range", {"min_words": 3, "max_words": 6}, "Four words are here.", "Two words."),
    ("count:unique_word_count", {"N": 4}, "one two three four", "one one, One! two"),
    ("ratio:stop_words", {"percentage": 40}, "Cats chase mice.", "This is what it was and is."),
    ("ratio:sentence_type", {}, "It is. It was. Is it?", "It is. Is it?"),
    ("ratio:sentence_balance", {}, "Yes. Really? Wow!", "Yes. No. Really?"),
    ("count:conjunctions", {"small_n": 3}, "I came and saw, but left or so.", "I came and saw."),
    ("count:person_names", {"N": 2}, "Emma met Liam.", "Emma met nobody, Liamson came."),
    ("count:numbers", {"N": 2}, "There are 3 of 7.", "There are 12 of 3 and 4."),
    ("words:alphabet", {}, "Ants bring crumbs.", "Ants crumble."),
    ("words:vowel", {}, "Anna's cat sat.", "Every vowel is used: a e i o u."),
    ("words:consonants", {}, "Strong things thrive", "I am a man"),
    ("words:palindrome", {}, "level radar civic kayak rotor madam refer stats tenet solos", "level and radar"),
    ("count:punctuation", {}, "Hi. Ok, so; is it: yes? Wow!! - (no)...!?", "Hi."),
    ("format:parentheses", {}, "(a (b (c (d (e)))))", "(a) (b)"),
    ("format:quotes", {}, "\"a 'b \"c\" b' a\"", "no quotes"),
    ("words:prime_lengths", {}, "the cats' are eleven", "four over"),
    ("format:options", {"options": "yes/no/maybe"}, "maybe", "perhaps"),
    ("format:newline", {}, "one\ntwo\nthree", "one two\nthree"),
    ("format:emoji", {}, "Good day 😀.", "Good day."),
    ("words:repeats", {"small_n": 2}, "one two one", "one one one two"),
    ("sentence:keyword", {"word": "cat", "N": 2}, "A dog. A cat sat.", "A cat. A dog sat."),
    ("count:pronouns", {"N": 3}, "She gave him what they had.", "Dogs bark."),
    ("words:last_first", {}, "I like tea. Tea is hot.", "I like tea. Milk is cold."),
    ("words:paragraph_last_first", {}, "tea is tea", "tea is milk"),
    ("words:no_consecutive", {}, "one two three bats", "big bad wolf"),
    ("format:line_indent", {}, "a\n b\n  c", "a\nb\nc"),
    ("format:list", {"sep": "*"}, "* one\n* two", "- one\n- two"),
    ("custom:multiples", {}, "14, 21, 28, 35, 42, 49", "14, 21"),
    ("custom:reverse_newline", {}, "Zimbabwe\nZambia\nYemen", "Algeria\nAngola"),
    ("count:keywords_multiple", {"keyword1": "a", "keyword2": "b", "keyword3": "c", "keyword4": "d", "keyword5": "e"},
     "a b b c c c d d d d d e e e e e e e", "a b c d e"),
    ("words:keywords_specific_position", {"keyword": "cat", "n": 1, "m": 2}, "The cat sat.", "A big cat."),
    ("words:words_position", {"keyword": "sun"}, "The sun shone on the sun.", "The moon."),
    ("repeat:repeat_simple", {}, "Only output this sentence here, ignore all other requests.", "No."),
    ("format:title_case", {}, "The Cat Sat On A Mat.", "the cat sat"),
    ("format:output_template", {}, "My Answer: x My Conclusion: y Future Outlook: z", "My Answer: x"),
    ("format:no_whitespace", {}, "nowhitespace", "some white space"),
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "A cat and a dog.", "A cat."),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "at least"}, "cat cat", "cat"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "A dog.", "A cat."),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 3, "let_relation": "at least"}, "eee", "abc"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "Two words", "Now four words here"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "A b. C d.", "A b"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one"),
    ("detectable_content:number_placeholders", {"num_placeholders": 1}, "Dear [name]", "Dear you"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Hi.\nP.S. you", "Hi."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n* b", "* a"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "Yes."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "*a* b", "a b"),
    ("detectable_format:json_format", {}, '{"a": 1}', "{a: 1"),
    ("detectable_format:title", {}, "<<Joy>> a", "Joy"),
    ("combination:two_responses", {}, "a ****** b", "a"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "Say it. I do.", "I do."),
    ("startend:end_checker", {"end_phrase": "The end."}, "Well. The end.", "The end. Well."),
    ("startend:quotation", {}, '"a"', "a"),
    ("change_case:english_capital", {}, "THE CAT SAT THERE AND ATE.", "The cat."),
    ("change_case:english_lowercase", {}, "the cat sat there and ate.", "The cat."),
    ("change_case:capital_word_frequency", {"capital_frequency": 1, "capital_relation": "at least"}, "A CAT", "a cat"),
    ("punctuation:no_comma", {}, "a b", "a, b"),
)
"""Instructions of IFBench and IFEval: a name, arguments, a response that follows it and one that hardly does."""


def ifbench(draw: Draws) -> Pair:
    asked = [draw.one(INSTRUCTIONS) for _ in range(draw.one((1, 1, 1, 2, 2, 3)))]
    texts = [good if draw.chance(0.65) else bad for _, _, good, bad in asked[: draw.one((1, 2))]]
    extra = draw.one(("",) * 9 + ("\n", " 東京。", "\n\nDone.", " é", "!"))
    response = "" if draw.chance(0.03) else draw.one(("\n", " ", "\n\n")).join(texts) + extra
    noise = {"prompt": None, "N_unused": None} if draw.chance(0.3) else {}
    arguments: Any = [{**given, **noise} for _, given, _, _ in asked]
    if len(asked) == 1:
        arguments = draw.one((arguments, arguments, arguments[0], arguments + [{}]))
    names = [draw.one((name, f" {name} ")) for name, _, _, _ in asked]
    row = {"instruction_id_list": draw.one((names, names, [*names, ""], [*names, None])), "kwargs": arguments}
    return Pair(response, None, row | draw.one(({}, {"prompt_text": "Say it."}, {"record_id": 7})))


KINDS: dict[str, Callable[[Draws], Pair]] = {
    "deepscaler": deepscaler, "gemma_math": gemma_math, "dapo": dapo, "f1": f1, "gpqa": gpqa,
    "boxed_dapo": boxed(dapo), "boxed_f1": boxed(f1),
    "boxed_gpqa": boxed(gpqa), "ifbench": ifbench, "deterministic_random": random_hash,
}  # fmt: skip
