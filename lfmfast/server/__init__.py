"""`lfmfast serve`: the model over HTTP, with the endpoints of llama-server and of OpenAI's and Anthropic's clients.

It only translates: what is generated, and how, is :class:`lfmfast.AsyncModel`'s.
"""
