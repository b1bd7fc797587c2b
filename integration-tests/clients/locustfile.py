"""What each of locust's users asks: native and OpenAI's routes, whole answers and streams."""

from locust import HttpUser, task


class Writer(HttpUser):
    @task
    def generate(self) -> None:
        self.client.post("/generate", json={"inputs": "Once upon a time", "parameters": {"max_new_tokens": 8}})

    @task
    def chat(self) -> None:
        messages = [{"role": "user", "content": "What is 2 + 3?"}]
        self.client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8})

    @task
    def stream(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 8, "stream": True}
        with self.client.post("/v1/completions", json=body, stream=True, catch_response=True) as answer:
            lines = [line for line in answer.iter_lines() if line]
            if not lines or lines[-1] != b"data: [DONE]":
                answer.failure(f"the stream ended with {lines[-1:]}")
