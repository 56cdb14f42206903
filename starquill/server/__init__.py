"""HTTP: OpenAI's, llama.cpp's and Ollama's routes over one engine."""
