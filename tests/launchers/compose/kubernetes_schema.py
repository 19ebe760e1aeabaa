"""What the controllers read of a manifest, as JSON schemas: closed, so that a misspelt field is a fault as it is for an
API server that validates strictly. Only what manifests here may hold, by the names of Kubernetes' core/v1 and apps,
the MPI operator's v2beta1 types and LeaderWorkerSet's v1 types.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

LABEL = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
QUANTITY = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+([EPTGMk]i?)?$"}]}


def closed(required: tuple[str, ...] = (), **properties: Any) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def many(items: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": items}


STRING: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 1}
FLAG: Schema = {"type": "boolean"}
METADATA = closed(("name",), name=LABEL, namespace=LABEL)

VARIABLE = closed(
    ("name",),
    name=STRING,
    value=STRING,
    valueFrom=closed(("fieldRef",), fieldRef=closed(("fieldPath",), fieldPath={"enum": ["status.podIP"]})),
)
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
PROBE = closed(
    ("httpGet",),
    httpGet=closed(
        ("path", "port"), path={"type": "string", "pattern": "^/"}, port=PORT, scheme={"enum": ["HTTP", "HTTPS"]}
    ),
    periodSeconds=COUNT,
    failureThreshold=COUNT,
)
CONTAINER = closed(
    ("name", "image", "command"),
    name=LABEL,
    image=STRING,
    command=many({"type": "string"}),
    env=many(VARIABLE),
    volumeMounts=many(
        closed(
            ("name", "mountPath"),
            name=LABEL,
            mountPath={"type": "string", "pattern": "^/"},
            subPath=STRING,
            readOnly=FLAG,
        )
    ),
    securityContext=closed(capabilities=closed(add=many(STRING))),
    ports=many(closed(("containerPort",), name=LABEL, containerPort=PORT)),
    startupProbe=PROBE,
    livenessProbe=PROBE,
    readinessProbe=PROBE,
    resources=closed(limits={"type": "object", "additionalProperties": QUANTITY}),
)
VOLUME = closed(
    ("name",),
    name=LABEL,
    configMap=closed(("name",), name=LABEL),
    emptyDir=closed(medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
    secret=closed(("secretName",), secretName=LABEL, defaultMode={"type": "integer", "minimum": 0, "maximum": 0o777}),
    persistentVolumeClaim=closed(("claimName",), claimName=LABEL, readOnly=FLAG),
) | {"minProperties": 2, "maxProperties": 2}
TEMPLATE = closed(("spec",), spec=closed(("containers",), containers=many(CONTAINER), volumes=many(VOLUME)))


def replica(count: Schema) -> Schema:
    return closed(("template",), replicas=count, restartPolicy={"enum": ["Never", "OnFailure"]}, template=TEMPLATE)


MPIJOB = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "kubeflow.org/v2beta1"},
    kind={"const": "MPIJob"},
    metadata=METADATA,
    spec=closed(
        ("mpiReplicaSpecs",),
        slotsPerWorker=COUNT,
        mpiImplementation={"enum": ["OpenMPI", "Intel", "MPICH"]},
        runPolicy=closed(cleanPodPolicy={"enum": ["None", "Running", "All"]}),
        sshAuthMountPath={"type": "string", "pattern": "^/"},
        mpiReplicaSpecs=closed(("Launcher", "Worker"), Launcher=replica({"const": 1}), Worker=replica(COUNT)),
    ),
)
LWS = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "leaderworkerset.x-k8s.io/v1"},
    kind={"const": "LeaderWorkerSet"},
    metadata=METADATA,
    spec=closed(
        ("leaderWorkerTemplate",),
        replicas=COUNT,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        leaderWorkerTemplate=closed(
            ("workerTemplate",),
            size=COUNT,
            restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
            leaderTemplate=TEMPLATE,
            workerTemplate=TEMPLATE,
        ),
    ),
)
CONFIG_MAP = closed(
    ("apiVersion", "kind", "metadata", "data"),
    apiVersion={"const": "v1"},
    kind={"const": "ConfigMap"},
    metadata=METADATA,
    data={"type": "object", "additionalProperties": STRING},
)

SERVICE = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "v1"},
    kind={"const": "Service"},
    metadata=METADATA,
    spec=closed(
        ("selector", "ports"),
        selector={"type": "object", "minProperties": 1, "additionalProperties": STRING},
        ports=many(closed(("port",), name=LABEL, port=PORT)),
    ),
)


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod templates' specs of a job or a set."""
    spec = manifest["spec"]
    if manifest["kind"] == "MPIJob":
        return [spec["mpiReplicaSpecs"][role]["template"]["spec"] for role in ("Launcher", "Worker")]
    return [spec["leaderWorkerTemplate"][role]["spec"] for role in ("leaderTemplate", "workerTemplate")]
