"""The guide's code for the browser, as it is written there, in a real browser with a ready model."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from trundle.runtime.encoder import Encoder

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "browser-phone-lambda.md"
NODE_MODULES = Path(os.environ.get("TRUNDLE_NODE_MODULES", "node_modules")).absolute()
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PAGE = """<script type="importmap">{"imports": {"@huggingface/transformers": "/transformers.min.js"}}</script>
<script type="module">CODE
document.body.textContent = JSON.stringify(sentence_embedding.tolist()[0]);
</script>"""


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """A site with the guide's code, transformers.js, its WebAssembly files and a model."""
    library = NODE_MODULES / "@huggingface" / "transformers" / "dist" / "transformers.min.js"
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    if not library.is_file():
        pytest.skip("needs npm i --ignore-scripts @huggingface/transformers, in TRUNDLE_NODE_MODULES")
    found = re.search(r"```js\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found is not None
    (tmp_path / "index.html").write_text(PAGE.replace("CODE", found[1]), encoding="utf-8")
    shutil.copy(library, tmp_path)
    shutil.copytree(NODE_MODULES / "onnxruntime-web" / "dist", tmp_path / "ort")
    shutil.copytree(ROOT / "models" / "all-MiniLM-L6-v2-8MB", tmp_path / "models" / "small")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_the_browser_gives_the_vector_of_the_runtime(site: str) -> None:
    """Nothing is loaded from elsewhere."""
    asked: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto(site)
        page.wait_for_function("document.body && document.body.textContent.startsWith('[')", timeout=60_000)
        vector = np.array(json.loads(page.inner_text("body")))
        browser.close()
    assert all(url.startswith((site, "blob:", "data:")) for url in asked)
    wanted = Encoder(ROOT / "models" / "all-MiniLM-L6-v2-8MB").encode_query("how do I cook onions?")
    assert vector @ wanted > 0.9999
