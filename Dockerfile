# jaxtrain for NVIDIA GPUs: docker build -t jaxtrain . && docker run --gpus all -v $PWD:/work jaxtrain --help
# The CUDA libraries come with the wheels; the host needs the driver (580 or newer) and its container toolkit.
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir "/src[cuda,rewards,tensorboard,wandb]" && rm -rf /src
WORKDIR /work
ENTRYPOINT ["jaxtrain"]
