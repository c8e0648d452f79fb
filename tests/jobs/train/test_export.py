"""The words that a run's sample text continues."""

from outpace.data.tokenizer_training import train_tokenizer
from outpace.jobs.train.export import PROMPT_TOKENS, whole_words

TEXT = "somebody said that whole words are easier to continue than pieces of them "


def test_a_prompt_has_whole_words_unless_blanks_separate_none():
    tokenizer = train_tokenizer([TEXT * 20], 300, masked=False)
    ids = tokenizer.encode(TEXT)
    rest = tokenizer.decode(whole_words(ids[1:], tokenizer, begins=False))
    begun = tokenizer.decode(whole_words(ids, tokenizer, begins=True))
    assert rest.startswith(" said") and begun.startswith("somebody")
    assert {*rest.split(), *begun.split()} <= {*TEXT.split()}
    one_word = tokenizer.encode("somebody" * 9)
    assert whole_words(one_word, tokenizer, begins=False) == one_word[:PROMPT_TOKENS]
