"""The values under which the chart is rendered: each workload, each option, and those that it has to refuse."""

from __future__ import annotations

from typing import Any, Final

Values = dict[str, Any]
_APART: Final[Values] = {"prefill_decode": {"replicas": 0}, "prefill": {"replicas": 1}, "decode": {"replicas": 2}}
_GPU: Final[Values] = {"count": 1, "runtimeClassName": "nvidia"}
_SCALED: Final[Values] = {"encoder": {"replicas": 1}, "prefill_decode": {"replicas": 1}}
_RAY: Final[Values] = {"workload": "ray", "ray": {"image": "triptych-ray:1"}}
_PEERS: Final = [{"namespaceSelector": {"matchLabels": {"team": "chat"}}}]

MATRIX: Final[dict[str, Values]] = {
    "the defaults": {},
    "1e1p2d": {"roles": _APART},
    "1epd, one proxy": {
        "roles": {
            "encoder": {"replicas": 0},
            "prefill_decode": {"replicas": 0},
            "encode_prefill_decode": {"replicas": 1},
        },
        "proxy": {"replicas": 1},
    },
    "text only": {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "roles": {"encoder": {"replicas": 0}}},
    "a GPU for each": {"roleDefaults": {"gpu": _GPU}, "proxy": {"gpu": {"count": 0}}},
    "MPS, four on one GPU": {
        "roles": {"encoder": {"replicas": 4, "gpu": {**_GPU, "sharing": "mps", "clients": 4}}},
        "devicePlugin": {"create": True},
    },
    "time slices, renamed": {
        "roles": {
            "prefill_decode": {
                "gpu": {**_GPU, "sharing": "timeSlicing", "clients": 2, "resource": "nvidia.com/gpu.shared"},
                "settings": {"engine": {"memory_fraction": 0.4}},
            }
        },
        "devicePlugin": {"create": True, "rename": True},
    },
    "HPA, ServiceMonitor": {
        "roles": _SCALED,
        "roleDefaults": {"autoscaling": {"kind": "hpa"}},
        "monitoring": {"serviceMonitor": True, "labels": {"release": "prometheus"}},
    },
    "KEDA, ServiceMonitor with a key": {
        "roles": _SCALED,
        "roleDefaults": {"autoscaling": {"kind": "keda", "targetSeconds": 1.5}},
        "monitoring": {"serviceMonitor": True, "authorization": {"credentials": {"name": "scrape", "key": "token"}}},
    },
    "an external Redis, all Secrets of one's own": {
        "broker": {"create": False},
        "keys": {"existingSecret": "mine", "apiKeysSecret": "clients"},
        "hub": {"tokenSecret": {"name": "hub"}, "existingClaim": "cache"},
        "models": {"existingClaim": "models"},
    },
    "an external Redis by URL, keys in values": {
        "broker": {"create": False, "url": "rediss://:secret@redis.example:6380"},
        "keys": {"apiKeys": ["one", "two"]},
        "models": {"hostPath": "/srv/models"},
    },
    "everything about pods": {
        "settings": {"request_timeout_s": 90.5, "max_inflight": 8, "engine": {"max_model_len": 1048576}},
        "image": {"registry": "registry.example/team", "tag": "1", "pullSecrets": ["pull"], "pullPolicy": "Always"},
        "roleDefaults": {
            "spread": ["kubernetes.io/hostname", "topology.kubernetes.io/zone"],
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "priorityClassName": "high",
            "annotations": {"a/b": "c"},
            "env": {"HF_HUB_OFFLINE": "1"},
            "maxUnavailable": "25%",
        },
        "networkPolicy": {"apiFrom": _PEERS, "metricsFrom": []},
        "serviceAccount": {"annotations": {"role": "x"}},
        "proxy": {"service": {"type": "LoadBalancer", "port": 8080, "annotations": {"x": "y"}}},
    },
    "no policies, a given account": {
        "networkPolicy": {"enabled": False},
        "serviceAccount": {"create": False, "name": "mine"},
    },
    "DisaggregatedSet": {"workload": "disaggregatedSet", "roles": _APART},
    "DisaggregatedSet on GPUs": {"workload": "disaggregatedSet", "roles": _APART, "roleDefaults": {"gpu": _GPU}},
    "RayService": _RAY,
    "RayService, scaled, on GPUs": {
        "workload": "ray",
        "ray": {"image": "triptych-ray:1", "workers": {"gpus": 1, "nodeSelector": {"pool": "gpu"}}},
        "roles": {"encoder": {"autoscaling": {"kind": "keda"}, "gpu": {**_GPU, "sharing": "mps", "clients": 4}}},
        "settings": {"engine": {"device": "cuda"}},
        "keys": {"apiKeys": ["one"]},
    },
}

REFUSED: Final[dict[str, tuple[Values, str]]] = {
    "an unknown value": ({"roles": {"encoder": {"replica": 2}}}, "'replica' not allowed"),
    "an unknown role": ({"roles": {"embedder": {"replicas": 1}}}, "'embedder' not allowed"),
    "a setting that the chart gives": ({"settings": {"broker": "redis://x"}}, "/settings"),
    "no broker at all": ({"broker": {"create": False}}, "needs broker.url"),
    "two brokers": ({"broker": {"url": "redis://x"}}, "set broker.create false"),
    "clients of a GPU that is not shared": (
        {"roles": {"encoder": {"gpu": {"count": 1, "clients": 2}}}},
        "need gpu.sharing",
    ),
    "a DisaggregatedSet of another role": ({"workload": "disaggregatedSet"}, "give roles.prefill_decode.replicas 0"),
    "Ray without an image": ({"workload": "ray"}, "needs ray.image"),
    "Ray with settings of a role": (
        {**_RAY, "roles": {"encoder": {"settings": {"engine": {"max_num_seqs": 8}}}}},
        "would drop roles.encoder.settings",
    ),
    "Ray with variables of all roles": ({**_RAY, "roleDefaults": {"env": {"A": "1"}}}, "would drop roleDefaults.env"),
    "Ray with resources of a role": (
        {**_RAY, "roles": {"prefill_decode": {"resources": {"requests": {"cpu": "2"}}}}},
        "would drop roles.prefill_decode.resources",
    ),
    "Ray with settings of the proxy": (
        {**_RAY, "proxy": {"settings": {"max_inflight": 8}}},
        "would drop proxy.settings",
    ),
}
