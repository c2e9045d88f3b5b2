"""A NeMo Gym of 0.7, scripted: head server, one agent with its environment server, one resources
server with the tool `calculator`, all at one port. The agent plays as Gym's simple_agent does."""

import asyncio
import json

import aiohttp
import yaml
from aiohttp import web

PLACES = {"calc": "res", "calc_agent": "agent", "calc_environment_server": "env"}
PASSED_ON = ("metadata", "temperature", "top_p", "parallel_tool_calls", "tool_choice")


class FakeGym:
    """Answers to POST /run come of `policy_url`. verdict: what /verify adds to the row; behave:
    (body of /run) -> what is done instead of playing: a status, or a dict that replaces keys of
    the answer, or "die": it is gone, for `away` questions after its health, and then back with all
    its servers elsewhere. crowd: runs that must have come before it dies. want: the token without
    which nothing is answered."""

    def __init__(
        self, verdict=None, behave=lambda body: None, max_steps=5, away=0, crowd=0, want=""
    ):
        self.policy_url, self.token = "", ""
        self.verdict, self.behave, self.max_steps = verdict or {}, behave, max_steps
        self.runs, self.seeded, self.sessions = [], [], []
        self.now = self.most = 0
        self.away, self.crowd, self.want, self.life = away, crowd, want, 0

    async def __aenter__(self):
        app = web.Application(client_max_size=1 << 26, middlewares=[self.guard])
        app.router.add_get("/health", self.health)
        app.router.add_get("/server_instances", self.instances)
        app.router.add_get("/global_config_dict_yaml", self.config)
        app.router.add_get("/{life}/{server}/livez", self.alive)
        app.router.add_get("/{life}/{server}/openapi.json", self.openapi)
        app.router.add_post("/{life}/env/run", self.run)
        app.router.add_post("/{life}/agent/run", self.run)
        app.router.add_post("/{life}/res/seed_session", self.seed)
        app.router.add_post("/{life}/res/verify", self.verify)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()

    @web.middleware
    async def guard(self, request, handler):
        if self.want and request.headers.get("Authorization") != f"Bearer {self.want}":
            return web.Response(status=401)
        if request.match_info.get("life", str(self.life)) != str(self.life):
            request.transport.close()  # as if nobody listened there any more
        return await handler(request)

    async def health(self, request):
        if self.life and self.away:
            self.away -= 1
            return web.Response(status=503)
        return web.json_response({})

    async def instances(self, request):
        return web.json_response(
            [{"config_path": name, "url": self.place(path)} for name, path in PLACES.items()]
        )

    def place(self, server):
        """URL of "agent", "env" or "res"."""
        return f"{self.url}/{self.life}/{server}"

    async def alive(self, request):
        return web.json_response({})

    async def openapi(self, request):
        routes = {"res": ["/seed_session", "/verify"]}.get(request.match_info["server"], ["/run"])
        return web.json_response({"paths": dict.fromkeys(routes, {})})

    async def config(self, request):
        agent = {"resources_server": {"type": "resources_servers", "name": "calc"}}
        relay = {"agent_server": {"type": "responses_api_agents", "name": "calc_agent"}}
        actual = {
            "calc": {"resources_servers": {"calc": {"entrypoint": "app.py"}}},
            "calc_agent": {"responses_api_agents": {"simple_agent": agent}},
            "calc_environment_server": {"environment_servers": {"legacy_agent": relay}},
            "policy_model_name": "policy",
        }
        return web.json_response(yaml.safe_dump(actual))

    async def run(self, request):
        body = await request.json()
        self.runs.append((request.path, body))
        instead = self.behave(body)
        if instead == "die":
            after = self.life + 1
            while len(self.runs) < self.crowd:
                await asyncio.sleep(0.005)
            self.life = after
            request.transport.close()
            return web.Response()
        if isinstance(instead, int):
            return web.json_response("Hit an exception calling an inner server", status=instead)
        self.now += 1
        self.most = max(self.most, self.now)
        async with aiohttp.ClientSession() as session:
            response = await self.play(session, body["responses_create_params"])
        self.now -= 1
        if response is None:
            return web.json_response("Hit an exception calling an inner server", status=500)
        answer = {"mask_sample": False, "failure_kind": None, "reward": 1.0, **self.verdict}
        return web.json_response({**body, "response": response, **answer, **(instead or {})})

    async def play(self, session, params):
        """Turns and tool calls, as items of a response; None where a model call failed."""
        functions = [
            {k: v for k, v in t.items() if k not in ("type", "strict")}
            for t in params.get("tools", [])
        ]
        messages, output, status = list(params["input"]), [], "completed"
        for _ in range(self.max_steps):
            requests = {key: params[key] for key in PASSED_ON if key in params} | {
                "messages": messages,
                "tools": [{"type": "function", "function": entry} for entry in functions],
                "max_tokens": params["max_output_tokens"],
                "model": "policy",
                "logprobs": True,
                "top_logprobs": 0,
                "return_token_ids": True,
            }
            headers = {"Authorization": f"Bearer {self.token}"}
            url = f"{self.policy_url}/chat/completions"
            async with session.post(url, json=requests, headers=headers) as answer:
                payload = await answer.json()
                if answer.status == 400 and "context length" in json.dumps(payload):
                    text = {"type": "output_text", "text": "", "annotations": []}
                    output.append({"type": "message", "role": "assistant", "content": [text]})
                    status = "incomplete"
                    break
                if answer.status != 200:
                    return None
            (choice,) = payload["choices"]
            message = choice["message"]
            messages.append(message)
            ids = {
                "prompt_token_ids": payload["prompt_token_ids"],
                "generation_token_ids": choice["token_ids"],
            }
            calls = message.get("tool_calls") or []
            for call in calls:
                function = call["function"]
                output.append({"type": "function_call", "call_id": call["id"], **function, **ids})
                result = str(eval(json.loads(function["arguments"])["expression"]))  # of the test
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
                reported = {"type": "function_call_output", "call_id": call["id"], "output": result}
                output.append(reported)
            if not calls:
                text = {"type": "output_text", "text": message["content"], "annotations": []}
                output.append({"type": "message", "role": "assistant", "content": [text], **ids})
                break
        return {"object": "response", "status": status, "output": output}

    async def seed(self, request):
        self.seeded.append(await request.json())
        response = web.json_response({})
        response.set_cookie("Calc___calc", str(len(self.seeded)))
        return response

    async def verify(self, request):
        body = await request.json()
        await asyncio.sleep(0)
        self.sessions.append(request.cookies.get("Calc___calc"))
        texts = [
            part["text"]
            for item in body["response"]["output"]
            if item["type"] == "message"
            for part in item["content"]
        ]
        right = bool(texts) and body["answer"] in texts[-1]
        return web.json_response({**body, "reward": float(right), **self.verdict})
