import pytest
import torch

from outpace.nn.compilation import compile_forwards
from outpace.nn.generate import generate
from outpace.records.errors import BadInputError

CAUSAL = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
PROMPT = [5, 17, 3, 60, 8]


def _greedy_without_cache(model, tokens, count):
    """Reads everything anew for each token; beyond the positions, from their newest half."""
    written, start = list(tokens), 0
    for _ in range(count):
        if len(written) - start > model.spec.max_positions:
            start = len(written) - model.spec.max_positions // 2
        with torch.no_grad():
            hidden = model(torch.tensor([written[start:]]))
        written.append(int(model.logits(hidden)[0, -1].argmax()))
    return written


@pytest.mark.parametrize("family", CAUSAL)
def test_the_cache_changes_nothing(make_model, family):
    model = make_model(family, tied=False)  # tied, random weights repeat themselves
    wanted = _greedy_without_cache(model, PROMPT, 80)  # twice the model's positions
    assert generate(model, PROMPT, 80, temperature=0) == wanted
    assert len(set(wanted)) > 10  # a text that varies


def test_a_prompt_longer_than_the_positions_is_read_from_its_newest_half(make_model):
    model = make_model("llama")
    long = [index % 61 for index in range(100)]
    written = generate(model, long, 3, temperature=0)
    assert written[:100] == long
    assert written[100:] == generate(model, long[-20:], 3, temperature=0)[20:]


def test_the_seed_determines_the_text(make_model):
    model = make_model("gpt2")
    texts = [generate(model, PROMPT, 20, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_top_k_keeps_to_the_likeliest(make_model):
    model = make_model("qwen3")
    assert generate(model, PROMPT, 20, 5.0, top_k=1) == generate(model, PROMPT, 20, temperature=0)
    with torch.no_grad():
        likeliest = model.logits(model(torch.tensor([PROMPT])))[0, -1].topk(3).indices.tolist()
    seen = {generate(model, PROMPT, 1, 5.0, top_k=3, seed=seed)[-1] for seed in range(40)}
    assert seen == set(likeliest)


def test_a_temperature_near_zero_takes_the_likeliest(make_model):
    model = make_model("llama")
    assert generate(model, PROMPT, 20, 1e-320) == generate(model, PROMPT, 20, temperature=0)


def test_it_stops_at_the_stop_token(make_model):
    model = make_model("llama")
    free = generate(model, PROMPT, 10, temperature=0)
    assert (
        generate(model, PROMPT, 10, temperature=0, stop_ids={free[8]})
        == free[: free.index(free[8], 5)]
    )


@pytest.mark.filterwarnings("default")
def test_the_model_is_left_as_it_was(make_model):
    model = make_model("gpt2", dropout=0.5).train()
    first = generate(model, PROMPT, 10, temperature=0)
    assert model.training
    assert first == generate(model.eval(), PROMPT, 10, temperature=0)
    assert not model.training
    compile_forwards([model])  # lengths that change at each token are not for the compiler
    assert first == generate(model, PROMPT, 10, temperature=0)


def test_room_is_taken_for_the_tokens_wanted_not_for_all_positions(make_model):
    model = make_model("llama", max_positions=2**32)
    assert len(generate(model, PROMPT, 3, stop_ids=())) == len(PROMPT) + 3


def test_bad_requests_get_a_sentence(make_model):
    model = make_model("llama")
    with pytest.raises(BadInputError, match="both directions"):
        generate(make_model("bert"), PROMPT, 1)
    with pytest.raises(BadInputError, match="no tokens"):
        generate(model, [], 1)
    with pytest.raises(BadInputError, match="token 61 is outside"):
        generate(model, [1, 61], 1)
    with pytest.raises(BadInputError, match="temperature -1"):
        generate(model, PROMPT, 1, temperature=-1)
    with pytest.raises(BadInputError, match="top_k 0"):
        generate(model, PROMPT, 1, top_k=0)
