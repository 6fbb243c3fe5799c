"""acme-models does what pagedllm expects of a plugin that provides models."""

from pagedllm.testing import ModelProviderSuite


class TestModels(ModelProviderSuite):
    """What pagedllm checks; the README of pagedllm.testing lists it."""

    plugin = "acme-models"


def test_the_model_is_ours():
    """Checks of your own go here."""
    from acme_models.plugin import NAME

    assert NAME == "acme-models-model"
