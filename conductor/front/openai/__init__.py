"""OpenAI's vocabulary: the fields of bodies, messages, tools, and the prompt that they make."""
