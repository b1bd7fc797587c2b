import subprocess
import sys


def test_serving_imports_no_transformers() -> None:
    """It takes seconds, and is not needed: config.json and tokenizer.json are read here."""
    code = "import sys, text_generation_server.server; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
