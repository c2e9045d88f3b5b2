"""Variables of the chat template in NeMo Gym: those of rows, and of Gym's own metadata."""

from test_environments_nemo_gym import CALL, ROW, play

from jaxtrain.data.chat.template import load_tokenizer


def test_variables_of_the_chat_template_come_from_rows_and_requests():
    """From the row in both modes; what Gym's own metadata say replaces it."""
    tokenizer = load_tokenizer("builtin")
    tokenizer.chat_template = "{{ mood }}|" + tokenizer.chat_template
    params = ROW["responses_create_params"]
    own = params | {"metadata": {"chat_template_kwargs": '{"mood": "dull"}'}}
    for mode, texts in (("agent", [CALL, "It is 4."]), ("verify", ["It is 4."])):
        options = {"mode": mode, "port": 0} if mode == "verify" else {}
        row = ROW | {"chat_template_kwargs": {"mood": "bright"}}
        (episode,), _ = play(tokenizer, texts, row=row, **options)
        assert tokenizer.decode(episode.tokens).startswith("bright|")
    row |= {"responses_create_params": own}
    (episode,), _ = play(tokenizer, texts, row=row, mode="verify", port=0)
    assert tokenizer.decode(episode.tokens).startswith("dull|")
    row |= {"responses_create_params": own | {"metadata": {"chat_template_kwargs": "{"}}}
    (failure,), _ = play(tokenizer, texts, row=row, mode="verify", port=0)
    assert "metadata.chat_template_kwargs: broken JSON" in failure.cause
