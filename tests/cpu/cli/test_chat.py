"""The terminal chat: reading messages, commands, Ctrl-C, statistics, and the two backends."""

import io
import json
import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from offroad.cli import backend, run
from offroad.cli.backend import AnswerStats, LocalBackend, ServerBackend
from offroad.cli.chat import Chat, read_message, stop_flag
from offroad.errors import OffroadError, RequestError, SettingsError


def lines(*values):
    """A `read` that gives these lines, raising those that are exceptions, then EOFError."""
    left = list(values)

    def read(prompt: str) -> str:
        if not left:
            raise EOFError
        value = left.pop(0)
        if isinstance(value, type):
            raise value
        return value

    return read


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["hello"], "hello"),
        (["a\\", "b\\", "c"], "a\nb\nc"),
        (['"""one', "two", 'three"""'], "one\ntwo\nthree"),
        (['"""', "x", "", "y", '"""'], "x\n\ny"),
        (['"""short"""'], "short"),
        (["```python", "x = 1", "```"], "```python\nx = 1\n```"),
        (['"""ends with a backslash\\', '"""'], "ends with a backslash\\"),
        (["say ```"], "say ```"),
    ],
)
def test_messages(typed, message):
    assert read_message(lines(*typed)) == message


def test_end_of_input_passes_through():
    with pytest.raises(EOFError):
        read_message(lines('"""never closed'))


class Fake:
    """Answers with pieces; `events` records what the chat did with it."""

    def __init__(self, *answers, raise_at_once=False):
        self.answers, self.raise_at_once, self.stats, self.events = list(answers), raise_at_once, None, []

    def answer(self, messages, options):
        self.events.append([dict(m) for m in messages])
        answer = self.answers.pop(0)
        try:
            for piece in answer:
                if isinstance(piece, BaseException):
                    raise piece
                if callable(piece):
                    piece()
                    continue
                yield piece
        finally:
            self.events.append("closed")
            self.stats = AnswerStats(10, len(answer), 4, 0.5, 1.5, "stop")

    def close(self):
        self.events.append("shut")


def chat_with(fake, system=None):
    return Chat(fake, {}, system, io.StringIO(), io.StringIO())


def test_a_conversation_keeps_its_history_and_reset_keeps_the_system_message():
    fake = Fake(["Hel", "lo"], ["again"], ["new"])
    chat = chat_with(fake, system="be brief")
    chat.loop(lines("hi", "more", "", "/reset", "third", "/exit", "never"))
    first, _, second, _, third, _ = fake.events
    assert [m["role"] for m in second] == ["system", "user", "assistant", "user"]
    assert second[2]["content"] == "Hello"
    assert first == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert third == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "third"}]
    assert chat.out.getvalue() == "Hello\nagain\nnew\n"


def test_statistics_follow_the_answer():
    chat = chat_with(Fake(["a", "b", "c"]))
    chat.ask("x")
    assert chat.notes.getvalue() == "[3 tokens, 2.0 tok/s, first after 0.50 s, 4 of 10 prompt tokens cached]\n"


def test_commands():
    chat = chat_with(Fake())
    chat.loop(lines("/help", "/nonsense now", "/exit"))
    notes = chat.notes.getvalue()
    assert "/reset" in notes
    assert "unknown command /nonsense" in notes


def test_a_refused_message_is_forgotten_and_the_chat_goes_on():
    fake = Fake([RequestError("messages", found="5000 tokens", accepted="at most 2048")], ["fine"])
    chat = chat_with(fake)
    chat.loop(lines("long", "short"))
    assert "error: messages" in chat.notes.getvalue()
    assert fake.events[2] == [{"role": "user", "content": "short"}]


def test_ctrl_c_stops_the_answer_between_pieces_and_keeps_what_came():
    fake = Fake(["one ", lambda: os.kill(os.getpid(), signal.SIGINT), "two ", "three"], ["next"])
    chat = chat_with(fake)
    before = signal.getsignal(signal.SIGINT)
    chat.loop(lines("go", "and"))
    assert chat.out.getvalue() == "one two \nnext\n"
    assert "[stopped, " in chat.notes.getvalue()
    assert fake.events[2][1] == {"role": "assistant", "content": "one two "}
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_interrupts_a_server_at_once():
    fake = Fake(["one ", lambda: os.kill(os.getpid(), signal.SIGINT), "two"], raise_at_once=True)
    chat = chat_with(fake)
    chat.ask("go")
    assert chat.out.getvalue() == "one \n"
    assert fake.events[-1] == "closed"


def test_a_second_ctrl_c_raises():
    with pytest.raises(KeyboardInterrupt), stop_flag(False) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        os.kill(os.getpid(), signal.SIGINT)


def test_at_the_prompt_ctrl_c_leaves_only_twice_in_a_row():
    fake = Fake(["ok"])
    chat = chat_with(fake)
    chat.loop(lines(KeyboardInterrupt, "hi", KeyboardInterrupt, KeyboardInterrupt, "never"))
    assert len(fake.events) == 2


def test_stats_line_of_a_cut_answer_and_of_one_token():
    assert AnswerStats(3, 1, 0, 0.1, 0.1, "length").line() == (
        "1 tokens, first after 0.10 s, 0 of 3 prompt tokens cached, cut at the token limit"
    )


def test_defaults_come_from_the_checkpoint():
    assert backend.sampling_defaults({"temperature": 0.2, "top_p": None, "top_k": 5, "do_sample": True}) == {
        "temperature": 0.2,
        "top_k": 5,
    }
    assert backend.sampling_defaults({}) == {"temperature": 0.7}


class FakeLLM:
    """`stream_chat` as LLM has it, with one answer."""

    def __init__(self, pieces, finish="stop", error=None):
        self.engine = SimpleNamespace(source_tokenizer=SimpleNamespace(generation={"top_k": 7}))
        self.pieces, self.finish, self.error, self.aborted, self.params = pieces, finish, error, False, None

    def stream_chat(self, messages, params):
        self.params = params
        usage = SimpleNamespace(
            prompt_tokens=5, completion_tokens=0, cached_tokens=2, time_to_first_token=0.1, seconds=0.4
        )
        result = SimpleNamespace(finish_reason=None, error=self.error)
        output = SimpleNamespace(usage=usage, outputs=[result])
        done = False
        try:
            for piece in self.pieces:
                usage.completion_tokens += 1
                yield SimpleNamespace(text=piece, output=output)
            done = True
            result.finish_reason = self.finish
        finally:
            self.aborted = not done


def test_local_answers_use_the_checkpoints_sampling_and_the_users():
    llm = FakeLLM(["a", "", "b"])
    local = LocalBackend(llm)
    assert list(local.answer([], {"temperature": 0.0, "max_tokens": 9})) == ["a", "b"]
    assert (llm.params.top_k, llm.params.temperature, llm.params.max_tokens) == (7, 0.0, 9)
    assert (local.stats.completion_tokens, local.stats.cached_tokens, local.stats.finish_reason) == (3, 2, "stop")


def test_closing_a_local_answer_aborts_the_request():
    llm = FakeLLM(["a", "b", "c"])
    local = LocalBackend(llm)
    stream = local.answer([], {})
    next(stream)
    stream.close()
    assert llm.aborted
    assert local.stats.completion_tokens == 1


def test_a_local_answer_that_ends_with_an_error_raises():
    local = LocalBackend(FakeLLM(["a"], finish="error", error="non-finite value in layer 3"))
    with pytest.raises(OffroadError, match="layer 3"):
        list(local.answer([], {}))


@pytest.fixture
def server():
    """A server with canned answers: `server.reply` is (status, body); `server.body` what it was sent."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.server.body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.server.path = self.path
            status, text = self.server.reply
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        made.url = f"http://127.0.0.1:{made.server_address[1]}"
        yield made
        made.shutdown()
        thread.join()


def test_answers_of_a_server(server):
    events = [
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "Hé"}}]},
        {"choices": [{"delta": {"content": "llo"}, "finish_reason": "stop"}]},
        {
            "choices": [],
            "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}},
        },
    ]
    text = ": ping\n\n" + "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    server.reply = (200, text)
    remote = ServerBackend(server.url + "/v1/", "tiny")
    assert list(remote.answer([{"role": "user", "content": "x"}], {"temperature": 0})) == ["Hé", "llo"]
    assert server.path == "/v1/chat/completions"
    assert server.body["model"] == "tiny"
    assert server.body["temperature"] == 0
    assert (remote.stats.prompt_tokens, remote.stats.cached_tokens, remote.stats.finish_reason) == (9, 8, "stop")
    remote.close()


@pytest.mark.parametrize(
    "reply",
    [
        (400, '{"error": {"message": "too long"}}'),
        (200, 'data: {"error": {"message": "too long"}}\n\n'),
        (500, "too long"),
    ],
)
def test_errors_of_a_server_are_shown(server, reply):
    server.reply = reply
    with pytest.raises(RequestError, match="too long"):
        list(ServerBackend(server.url, "tiny").answer([], {}))


def test_no_server():
    with pytest.raises(OffroadError, match="offroad serve"):
        list(ServerBackend("http://127.0.0.1:9", "tiny").answer([], {}))


def test_settings_and_a_url_do_not_go_together():
    with pytest.raises(SettingsError, match="--max-num-seqs"):
        run.open_backend("m", "http://x", {"max_num_seqs": 3}, None)
    with pytest.raises(SettingsError, match="--config"):
        run.open_backend("m", "http://x", {}, "file.toml")


@pytest.fixture
def one_shot(monkeypatch):
    """`run` with a fake backend; gives the text that `stdin` holds to it."""
    made = Fake(["ans", "wer"])
    monkeypatch.setattr(run, "open_backend", lambda *arguments: made)
    return made


def call_run(**given):
    none = {"prompt": None, "url": None, "system": None, "max_tokens": None, "temperature": None, "config": None}
    from offroad.cli.options import FLAGS

    return run.run(
        **{
            **dict.fromkeys(name for name, flag in FLAGS.items() if flag.group != "serve"),
            **none,
            "model": "m",
            **given,
        }
    )


def test_one_answer_for_a_prompt(one_shot, capsys):
    call_run(prompt="question")
    assert capsys.readouterr().out == "answer\n"
    assert one_shot.events == [[{"role": "user", "content": "question"}], "closed", "shut"]


def test_the_prompt_may_come_from_stdin(one_shot, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    call_run()
    assert one_shot.events[0] == [{"role": "user", "content": "from a pipe"}]


def test_an_empty_stdin_is_an_error(one_shot, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(SettingsError, match="empty standard input"):
        call_run()
    assert one_shot.events == []
