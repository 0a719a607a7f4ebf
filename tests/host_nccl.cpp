// NCCL's interface, as nccl.h declares it, over sockets of one machine and in the memory of hosts: for communicators of
// two ranks. Calls return when the transfer is over, where NCCL's return when it is in the stream.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <random>
#include <vector>

extern "C" {

typedef struct ncclComm* ncclComm_t;
typedef struct CUstream_st* cudaStream_t;
typedef struct { char internal[128]; } ncclUniqueId;
typedef enum { ncclSuccess = 0, ncclSystemError = 2, ncclRemoteError = 6 } ncclResult_t;
typedef enum { ncclInt8, ncclUint8, ncclInt32, ncclUint32, ncclInt64, ncclUint64, ncclFloat16, ncclFloat32,
               ncclFloat64, ncclBfloat16 } ncclDataType_t;
typedef enum { ncclSum, ncclProd, ncclMax, ncclMin } ncclRedOp_t;

struct ncclComm { int fd; int rank; std::atomic<bool> failed; };

static size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 4;
  }
}

static ncclResult_t move(ncclComm_t comm, char* bytes, size_t count, bool sends) {
  while (count) {
    ssize_t done = sends ? send(comm->fd, bytes, count, MSG_NOSIGNAL) : recv(comm->fd, bytes, count, 0);
    if (done <= 0) { comm->failed = true; return ncclRemoteError; }
    bytes += done; count -= done;
  }
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) { return result == ncclRemoteError ? "remote error" : "error"; }
ncclResult_t ncclGetVersion(int* version) { *version = 22703; return ncclSuccess; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device draw;
  memset(id, 0, sizeof *id);
  for (int place = 0; place < 16; place++) id->internal[place] = 'a' + draw() % 26;
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  if (size != 2) return ncclSystemError;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;  // a name that no file system knows begins with a zero
  memcpy(address.sun_path + 1, id.internal, 16);
  socklen_t length = offsetof(sockaddr_un, sun_path) + 17;
  int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  if (rank == 0) {
    if (bind(fd, (sockaddr*)&address, length) || listen(fd, 1)) return ncclSystemError;
    int accepted = accept(fd, nullptr, nullptr);
    close(fd);
    fd = accepted;
  } else {
    while (connect(fd, (sockaddr*)&address, length)) usleep(1000);
  }
  *comm = new ncclComm{fd, rank, {false}};
  return ncclSuccess;
}

ncclResult_t ncclSend(const void* bytes, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t) {
  if (peer != 1 - comm->rank) return ncclSystemError;
  return move(comm, (char*)bytes, count * size_of(type), true);
}

ncclResult_t ncclRecv(void* bytes, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t) {
  if (peer != 1 - comm->rank) return ncclSystemError;
  return move(comm, (char*)bytes, count * size_of(type), false);
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                           ncclComm_t comm, cudaStream_t) {
  if (type != ncclFloat32 || (operation != ncclSum && operation != ncclMax)) return ncclSystemError;
  const size_t part = 4096;  // less than what a socket takes at once
  for (size_t first = 0; first < count; first += part) {
    size_t here = count - first < part ? count - first : part;
    std::vector<float> other(here);
    float* mine = (float*)to + first;
    memmove(mine, (const float*)from + first, here * 4);
    if (move(comm, (char*)mine, here * 4, true) || move(comm, (char*)other.data(), here * 4, false))
      return ncclRemoteError;
    for (size_t place = 0; place < here; place++)
      mine[place] = operation == ncclSum ? mine[place] + other[place]
                                         : (mine[place] > other[place] ? mine[place] : other[place]);
  }
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  *result = comm->failed ? ncclRemoteError : ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) { shutdown(comm->fd, SHUT_RDWR); return ncclSuccess; }

}
