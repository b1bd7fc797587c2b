import subprocess
import sys


def test_serving_imports_no_transformers() -> None:
    """transformers takes seconds to import, and serving does not need it: we read config.json and tokenizer.json
    ourselves.
    """
    code = "import sys, text_generation_server.server; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
