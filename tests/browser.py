"""A headless Chromium without a network, driven over a pipe: nothing to install but the browser.

The protocol is Chromium's DevTools protocol: JSON messages that end in a zero byte, written to the
browser's file descriptor 3 and read from its descriptor 4.
"""

import json
import os
import select
import shutil
import subprocess
import tempfile

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
HOW_TO_GET = "install one (Debian, Ubuntu: apt install chromium) or name it in CHROMIUM"
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars
--disable-background-networking --disable-component-update --disable-sync --disable-extensions
--disable-dev-shm-usage --disable-default-apps --no-default-browser-check --mute-audio
--remote-debugging-pipe""".split()
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND"


def executable():
    """The path of a Chromium on this machine, or None."""
    wanted = os.environ.get("CHROMIUM")
    return shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    def __init__(self, program):
        self.count, self.buffer, self.events = 0, b"", []
        self.profile = tempfile.mkdtemp(prefix="chromium-")
        self.said = tempfile.TemporaryFile()
        to_browser, self.out = os.pipe()
        self.back, from_browser = os.pipe()

        def wire():  # in the child: the two ends under the numbers that Chromium expects
            ends = os.dup(to_browser), os.dup(from_browser)  # above 4, whatever 3 and 4 were
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self.process = subprocess.Popen(
            [program, *FLAGS, NO_NETWORK, f"--user-data-dir={self.profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=self.said,
            close_fds=False,
            preexec_fn=wire,
        )
        os.close(to_browser)
        os.close(from_browser)

    def send(self, method, session=None, **params):
        """Call a method of the protocol and wait for its answer; events are kept for later."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while (answer := self.read(method)).get("id") != self.count:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def read(self, waiting_for):
        """The next message. A minute of silence is an error."""
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.back], [], [], 60)
            chunk = os.read(self.back, 1 << 20) if ready else b""
            if not chunk:
                self.said.seek(0)
                said = self.said.read().decode(errors="replace")[-2000:]
                raise RuntimeError(f"Chromium gave no answer to {waiting_for}. It said:\n{said}")
            self.buffer += chunk
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, url, width=1280, height=900, theme="light"):
        return Page(self, url, width, height, theme)

    def close(self):
        try:
            self.send("Browser.close")
            self.process.wait(10)
        except (RuntimeError, OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        finally:
            os.close(self.out)
            os.close(self.back)
            self.said.close()
            shutil.rmtree(self.profile, ignore_errors=True)


class Page:
    """One tab. `requests` and `complaints` grow as long as it is open."""

    def __init__(self, browser, url, width, height, theme):
        self.browser, self.loads = browser, 0
        self.target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.send("Target.attachToTarget", targetId=self.target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": theme}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.go(url)

    def send(self, method, **params):
        return self.browser.send(method, self.session, **params)

    def go(self, url):
        self.send("Page.navigate", url=url)
        self.loaded()

    def loaded(self):
        """Wait until the next page, its fonts and its formulas stand."""
        while len(self.mine("Page.loadEventFired")) == self.loads:
            self.browser.events.append(self.browser.read("a page"))
        self.loads += 1
        self.run("""(async () => {
            await document.fonts.ready;
            if (window.MathJax?.startup?.promise) await MathJax.startup.promise;
            await new Promise(done => setTimeout(done, 150));
        })()""")

    def run(self, script):
        """The value of a JavaScript expression; a promise is waited for."""
        answer = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:1000])
        return answer["result"].get("value")

    def mine(self, method):
        return [
            event["params"]
            for event in self.browser.events
            if event.get("method") == method and event.get("sessionId") == self.session
        ]

    @property
    def requests(self):
        return [event["request"]["url"] for event in self.mine("Network.requestWillBeSent")]

    @property
    def complaints(self):
        """Errors and warnings of the console, and exceptions nobody caught."""
        bad = "error", "warning", "assert"
        calls = [one for one in self.mine("Runtime.consoleAPICalled") if one["type"] in bad]
        entries = [one for one in self.mine("Log.entryAdded") if one["entry"]["level"] in bad]
        return [
            json.dumps(one) for one in (*calls, *self.mine("Runtime.exceptionThrown"), *entries)
        ]

    def close(self):
        self.browser.send("Target.closeTarget", targetId=self.target)
        self.browser.events = [
            event for event in self.browser.events if event.get("sessionId") != self.session
        ]
