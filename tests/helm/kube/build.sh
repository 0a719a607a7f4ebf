#!/bin/sh
# Builds a real API server of Kubernetes, which tests of the chart's Roles ask (tests/helm/test_helm_kube.py): 1.20, the
# newest whose whole source Debian carries. Takes some minutes, and 3 GB while it builds; does nothing where it is there
# already. Needs Debian's apt and its registry, no other network and no root: packages are unpacked, never installed.
# Prints the folder of the programs. SHOAL_KUBE: that folder, should it lie elsewhere.
set -eu
target=${SHOAL_KUBE:-${XDG_CACHE_HOME:-$HOME/.cache}/shoal/kubernetes-1.20}
keys=/usr/share/keyrings/debian-archive-keyring.gpg
registry=${DEBIAN_REGISTRY:-http://deb.debian.org/debian}

fail() {
    echo "tests/helm/kube/build.sh: $*" >&2
    exit 1
}

if [ -x "$target/kube-apiserver" ] && [ -x "$target/etcd" ]; then
    echo "$target"
    exit 0
fi
for program in apt-get dpkg-deb tar nice; do
    command -v "$program" >/dev/null || fail "$program is missing: this builds from packages of Debian"
done
[ -r "$keys" ] || fail "$keys is missing: the package debian-archive-keyring has it"
mkdir -p "$target"
free_kib=$(df -Pk "$target" | awk 'NR == 2 { print $4 }')
[ "$free_kib" -gt 4000000 ] || fail "$target has $((free_kib / 1024)) MiB left: the build needs 4000"
# One build at a time: who comes second finds it made. The lock goes with the process, however that ends.
if [ -z "${SHOAL_KUBE_LOCKED:-}" ] && command -v flock >/dev/null; then
    SHOAL_KUBE_LOCKED=1 exec flock "$target/.lock" sh "$0"
fi

work=$target/.build
rm -rf "$work"
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
mkdir -p "$work/lists/partial" "$work/archives/partial" "$work/root" "$work/go/src/k8s.io/kubernetes" "$work/cache"
cd "$work"
for kind in deb deb-src; do
    echo "$kind [signed-by=$keys] $registry bookworm main"
done >sources.list

# The machine's own list of packages stays as it is.
apt() {
    apt-get --quiet --quiet -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/archives" -o APT::Sandbox::User="$(id -un)" \
        -o APT::Update::Error-Mode=any "$@" >&2
}

apt update || fail "the packages of $registry cannot be listed"
apt download golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev etcd-server ||
    fail "packages of $registry cannot be fetched"
apt source --download-only kubernetes || fail "the source of Kubernetes cannot be fetched from $registry"
for package in *.deb; do
    dpkg-deb --extract "$package" root
done
sources=$work/go/src/k8s.io/kubernetes
tar xzf kubernetes_*.orig.tar.gz -C "$sources" --strip-components=1
# The one that is carried along dies of the first custom resource.
rm -r "$sources/vendor/github.com/modern-go/reflect2"
cp -r root/usr/share/gocode/src/github.com/modern-go/reflect2 "$sources/vendor/github.com/modern-go/"

export GOROOT="$work/root/usr/lib/go-1.19" GOPATH="$work/go" GOCACHE="$work/cache" GO111MODULE=off CGO_ENABLED=0
export GOFLAGS="" GOTOOLCHAIN=local
PATH="$GOROOT/bin:$PATH"
cd "$sources"
build() {
    nice -n 10 go build -ldflags "-s -w" -o "$work/$1" "$2" || fail "$1 cannot be built"
}

build openapi-gen ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
described=$(grep -rlE --include='*.go' '^// \+k8s:openapi-gen=true' staging/src/k8s.io pkg cmd | xargs -n 1 dirname | sort -u |
    sed -e 's#^staging/src/#vendor/#' -e 's#^#k8s.io/kubernetes/#' | paste -sd, -)
"$work/openapi-gen" --logtostderr -i "$described" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
    -h hack/boilerplate/boilerplate.generatego.txt -r "$work/violations" >&2 || fail "the API cannot be described"
build kube-apiserver ./cmd/kube-apiserver
cp "$work/root/usr/bin/etcd" "$target/.etcd"
mv "$target/.etcd" "$target/etcd"
mv "$work/kube-apiserver" "$target/kube-apiserver"
echo "$target"
