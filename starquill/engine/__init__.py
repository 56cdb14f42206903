"""From a request to its tokens: prompts, running, sampling, stopping."""
