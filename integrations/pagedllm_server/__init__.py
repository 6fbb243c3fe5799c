"""An HTTP server that speaks TGI's and OpenAI's protocols: ``pagedllm serve MODEL``.

Owner: the server integration. Invariants: it uses pagedllm's public API alone; it answers
every request, whatever is in it, with a result or with one error that says why; a client
that goes away, is slow or is late takes nothing from the others.

Modules: ``options`` (flags), ``cli`` (the process), ``app`` (routes together), ``gate``
(keys, limits, request ids, logs), ``service`` (the engine as the routes see it), ``tgi``,
``chat``, ``completions`` and ``responses`` (the routes), ``schemas_*`` (what they take),
``metrics`` and ``sse``.
"""
