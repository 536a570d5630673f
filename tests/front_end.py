"""A live panel, worked by the messages that a notebook in a browser sends."""

import time

from jupyter_client.manager import start_new_kernel


class Live:
    """A kernel that runs `panel`, as a front end sees it: the state of every widget by its id."""

    def __init__(self, panel):
        self.manager, self.client = start_new_kernel()
        self.widgets, self.bundle = {}, None
        self.execute(panel)

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def execute(self, code):
        asked = self.client.execute(code)
        self.follow(lambda: False, until_idle=asked)

    def follow(self, enough, until_idle=None, seconds=120):
        """Read what the kernel says until `enough()`, or until it has done what was asked."""
        end = time.monotonic() + seconds
        while not enough():
            message = self.client.get_iopub_msg(timeout=max(0.1, end - time.monotonic()))
            kind, content = message["msg_type"], message["content"]
            if kind == "comm_open":
                self.widgets[content["comm_id"]] = content["data"]["state"]
            elif kind == "comm_msg" and content["data"].get("method") == "update":
                self.widgets[content["comm_id"]] |= content["data"]["state"]
            elif kind == "display_data":
                self.before, self.bundle = self.bundle, content["data"]
            elif kind == "error":
                raise AssertionError("\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle" and until_idle:
                if message["parent_header"].get("msg_id") == until_idle:
                    return

    def find(self, **wanted):
        """(id, state) of the widget that has these values."""
        return next(
            (name, state)
            for name, state in self.widgets.items()
            if all(state.get(key) == value for key, value in wanted.items())
        )

    def tell(self, name, data):
        content = {"comm_id": name, "data": data}
        self.client.shell_channel.send(self.client.session.msg("comm_msg", content))

    def choose(self, description, **state):
        """Set a control to one of its labels, or to a text."""
        name, known = self.find(description=description)
        if "label" in state:
            state = {"index": known["_options_labels"].index(state["label"])}
        self.tell(name, {"method": "update", "state": state, "buffer_paths": []})

    def press(self, button):
        self.tell(
            self.find(description=button)[0], {"method": "custom", "content": {"event": "click"}}
        )

    def shown(self):
        return " ".join(
            str(state["value"])
            for state in self.widgets.values()
            if state.get("_model_name") == "HTMLModel"
        )
