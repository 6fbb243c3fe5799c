"""A provider plugin end to end: `pip install ./examples/provider_plugin`, then run this.

The plugin's files are what `pagedllm plugins new acme-models` writes.
"""

from __future__ import annotations

import pagedllm


def main() -> None:
    """Show what the plugin adds, and generate with its model by name."""
    [plugin] = [each for each in pagedllm.list_plugins() if each.name == "acme-models"]
    print("plugin:", plugin.distribution, plugin.version, plugin.status, *plugin.hooks)
    resolved = pagedllm.resolve_model("acme-models-model")
    print("folder:", resolved.path, "revision:", resolved.revision)
    params = pagedllm.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with pagedllm.LLM("acme-models-model-tiny", max_model_len=64) as llm:
        [output] = llm.generate("Hello", params)
        print("tokens of noise:", output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
