"""GBNF as llama.cpp reads it: the same texts accepted and refused, the same grammars refused."""

from __future__ import annotations

import random

import grammar_oracle
import oracle
import pytest
from grammar_walk import CONTROLS, accepts, walk

from lfmfast.constraint import from_gbnf
from lfmfast.errors import ParameterError

SHIPPED = sorted((oracle.llama_cpp_dir() / "grammars").glob("*.gbnf"))

# A grammar, and texts that it may accept or not: llama.cpp says which.
GRAMMARS = [
    (r'root ::= "yes" | "no"', ["yes", "no", "", "yesno", "y", "Yes"]),
    (r'root ::= [a-z]* "end"', ["end", "friend", "endend", "endx", "enend", "enaend", "en"]),
    (r'root ::= ("a" | "ab") ("c" | "bc")', ["abc", "ac", "abbc", "ab"]),
    (r"root ::= [^abc]+", ["xyz", "xaz", "\n", "é", "", "b"]),
    (r'root ::= [^"\\]* "\""', ['x"', '"', 'x\\"', "x"]),
    (r"root ::= [a\]\[\\\-z]+", ["a]", "[", "\\", "-", "z", "b", "]-["]),
    (r"root ::= [a-]+", ["a", "-", "b", "a-a"]),
    (r"root ::= [-a]+", ["a", "-", "b"]),
    (r"root ::= [a&&b]+", ["a", "&", "b", "&&", "c"]),
    (r"root ::= [[:alpha:]+", ["a", ":", "[", "b"]),
    (r"root ::= [a~~b--c]+", ["a", "~", "-", "b", "c", "d"]),
    (r"root ::= [^a-z&&x]+", ["A", "&", "x", "1"]),
    (r"root ::= [a^b]+", ["a", "^", "b", "c"]),
    (r'root ::= "\x41\u00e9\U0001F600"', ["Aé😀", "Aé", "A\u00e9\U0001f600x"]),
    (r"root ::= [\x41-\x43\u00e0-\u00ff]+", ["ABC", "é", "D", "\u0100"]),
    (r"root ::= [ぁ-ゟ]+ [\U00010000-\U0010FFFF]", ["ひ😀", "ひ", "a😀", "ひひ𝄞"]),
    (r"root ::= . .", ["ab", "\n\n", "é😀", "a", "abc", "\r\t"]),
    (r"root ::= .*", ["", "a\nb", "é"]),
    (r'root ::= "a"{3}', ["aaa", "aa", "aaaa"]),
    (r'root ::= "a"{2,}', ["a", "aa", "aaaaaa"]),
    (r'root ::= "a"{2,3} "a"', ["aa", "aaa", "aaaa", "aaaaa"]),
    (r'root ::= "a"{0,2}', ["", "a", "aa", "aaa"]),
    (r'root ::= ("ab" [0-9]?){1,2}', ["ab", "ab1", "ab1ab", "abab2", "ababab", ""]),
    (r'root ::= "a"{ 1 , 2 }', ["a", "aa", "aaa"]),
    (r'root ::= "ab"+', ["ab", "abab", "abb", "aab"]),
    (r'root ::= "a"* "b"? "c"+', ["c", "abc", "aac", "ab", "bcc", "abbc"]),
    (r'root ::= "a"+?', ["", "a", "aa"]),
    (r'root ::= | "a"', ["", "a", "b"]),
    (r'root ::= "a" | ', ["", "a"]),
    (r'root ::= ""', ["", "a"]),
    (r'root ::= "" "a" ""', ["a", ""]),
    (r'root ::= "\t\r\n\"\\\[\]"', ['\t\r\n"\\[]', "\t"]),
    ('# first\nroot ::= a b # the rest\n\n# next\na ::= "x" |\n  "y"\nb ::= ( "1"\n | # or\n "2" )\n', ["x1", "y2", "x"]),
    ('root ::= (\n  # a comment in a group\n  "1. " move " "\n)\nmove ::= [a-h] [1-8]\r\n', ["1. e4 ", "1. e4"]),
    ('root ::= "#" "a#b" # "c"', ["#a#b", "#", '#a#bc']),
    ('root ::= fooBar foobar foo-bar FOOBAR\nfooBar ::= "1"\nfoobar ::= "2"\nfoo-bar ::= "3"\nFOOBAR ::= "4"', ["1234", "1"]),
    ('root ::= 1 2a\n1 ::= "one"\n2a ::= "two"', ["onetwo", "one"]),
    ('root ::= start end\nstart ::= "s"\nend ::= "e"', ["se", "s"]),
    ('root ::= "a" root | "b"', ["b", "aab", "a"]),
    ('root ::= "(" root ")" root | ""', ["()", "(())()", "(()", ""]),
    ('root ::= x\nx ::= "a"\nx ::= "b"', ["a", "b"]),
    ('root ::= expr\nexpr ::= term ([-+*/] term)*\nterm ::= [0-9]+ | "(" expr ")"', ["1", "1+2*(3-4)", "1+", "((1))", "(1"]),
    ('root ::= [a-z]+ " " [a-z]+ "!"{0,2}', ["hello world", "hello world!!", "hello", "hello world!!!", "a b!"]),
    ("root ::= [\\x00-\\x1f]", ["\x01", "\x1f", " "]),
    ("root ::= [\x7f]", ["\x7f", "a"]),
    ('root ::= "\x7f/" [/]', ["\x7f//", "a"]),
]  # fmt: skip

REFUSED = [
    "", "root", "root ::= ", 'root = "a"', 'root ::= "a', "root ::= [a", 'root ::= ("a"', 'root ::= "a")', "root ::= *",
    'root ::= "a"{', 'root ::= "a"{x}', 'root ::= "a"{1', 'root ::= "a"{1,x}', 'root ::= "a"{,2}', r'root ::= "\q"',
    r'root ::= "\x4"', r'root ::= "\u12"', r'root ::= "\U0001"', "root ::= other", 'other ::= "a"', "root ::= a\na ::= b",
    'root ::= "a" ; "b"',
    'root ::= "a"{3000}', '::= "a"', 'root ::= "a" <', "root ::= ( | ", 'root ::= "a"\n"b"', "root ::= \\", 'root ::= "a\\',
]  # fmt: skip


@pytest.mark.parametrize(("text", "samples"), GRAMMARS, ids=[text[:40] for text, _ in GRAMMARS])
def test_accepts_what_llama_cpp_accepts(text, samples):
    theirs = grammar_oracle.OracleGrammar(text)
    assert theirs.ok
    ours = from_gbnf(text)
    assert {sample: accepts(ours, sample) for sample in samples} == {sample: theirs.accepts(sample) for sample in samples}
    rng = random.Random(text)
    for _ in range(10):
        if (found := walk(ours, rng, 60)) is not None and "\0" not in found:
            assert theirs.accepts(found), found


@pytest.mark.parametrize("text", REFUSED)
def test_refuses_what_llama_cpp_refuses(text):
    if text != "root ::= ":
        assert not grammar_oracle.OracleGrammar(text).ok
    if text == "root ::= ":  # nothing but the empty reply
        assert accepts(from_gbnf(text), "")
    else:
        with pytest.raises(ParameterError, match="the grammar"):
            from_gbnf(text)


# One text per grammar that it accepts; others are made of it.
SAMPLES = {
    "arithmetic": "x=1\n(a1+2)*b =2\n",
    "c": "int main(){return x;}",
    "chess": "1. e4 e5\n2. Nf3 Nc6\n10. O-O axb8=Q+\n",
    "english": "The quick, brown fox.",
    "japanese": "これはテスト、漢字。 カナ",
    "json": '{"a": [1, -2.5e+3, "x\\n\\u00e9é"], "b":\n  {"c": null, "d": true}}',
    "json_arr": '[\n{"a": [1, "b"]},\n2]',
    "list": "- apples\n- é and more\n",
}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_grammars_that_llama_cpp_ships(path):
    text = path.read_text("utf8")
    ours, theirs = from_gbnf(text), grammar_oracle.OracleGrammar(text)
    sample = SAMPLES[path.stem]
    assert accepts(ours, sample) and theirs.accepts(sample)
    rng = random.Random(path.stem)
    n_accepted = n_refused = 0
    for _ in range(150):  # a letter dropped, doubled, replaced, or the end cut off
        at = rng.randrange(len(sample))
        changed = sample[:at] + rng.choice(["", sample[at] * 2, rng.choice(sample), rng.choice('ab1 \n"é[')]) + sample[at + 1:]
        changed = changed[:rng.choice([len(changed), at])]
        expected = theirs.accepts(changed)
        assert accepts(ours, changed) == expected, changed
        n_accepted, n_refused = n_accepted + expected, n_refused + (not expected)
    assert n_accepted and n_refused
    for _ in range(20):
        if (found := walk(ours, rng, 200)) is not None:
            assert theirs.accepts(found), found


def test_tokens_of_the_model():
    thinking = from_gbnf('root ::= <think> [a-z]* </think> "x"')
    assert accepts(thinking, "<think>abc</think>x") and not accepts(thinking, "abc</think>x")
    by_number = 256 + CONTROLS.index("<think>")
    other = from_gbnf(f"root ::= <[{by_number}]> !<[{by_number}]> {{2}}")
    assert accepts(other, "<think>ab") and accepts(other, "<think></think>b") and not accepts(other, "<think><think>b")
    with pytest.raises(ParameterError, match="by its number"):
        from_gbnf("root ::= !<think>")
    assert not accepts(from_gbnf('root ::= "<" .*'), "<think>")  # a control token is not its own name


def test_another_root_and_errors_name_the_line():
    assert accepts(from_gbnf('root ::= "a"\nother ::= "b"', root="other"), "b")
    with pytest.raises(ParameterError, match="no rule 'main'"):
        from_gbnf('root ::= "a"', root="main")
    with pytest.raises(ParameterError, match=r"line 3, at 'nowhere'.*no rule 'nowhere'"):
        from_gbnf('root ::= a\na ::= "x"\n  | nowhere'.replace("\n  |", " |\n"))
    with pytest.raises(ParameterError, match="NUL"):
        from_gbnf("root ::= \0")
    with pytest.raises(ParameterError, match="lone surrogate"):
        from_gbnf('root ::= "\ud800"')
    with pytest.raises(ParameterError, match=r"\{3,1\}"):
        from_gbnf('root ::= "a"{3,1}')
    with pytest.raises(ParameterError, match="nested deeper"):
        from_gbnf("root ::= " + "(" * 1000 + '"a"' + ")" * 1000)
    chain = "".join(f'a{n} ::= a{n + 1} "x"\n' for n in range(5000))
    with pytest.raises(ParameterError, match="more than 200 rules"):
        from_gbnf(f'root ::= a0\n{chain}a5000 ::= "y"')
    wide = " | ".join(f"b{n}" for n in range(1000)) + "".join(f'\nb{n} ::= "{n}"' for n in range(1000))
    assert accepts(from_gbnf(f"root ::= {wide}"), "999")
    with pytest.raises(ParameterError, match="limit"):
        from_gbnf('root ::= "' + "a" * (1 << 20) + '"')
