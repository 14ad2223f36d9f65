// Make gloo in torch 2.13.0+cpu for Linux x86-64 do what the proposed change does, without building torch:
//   g++ -std=c++17 -O2 -shared -fPIC -o signal_all.so gloo_signal_all.cc && LD_PRELOAD=$PWD/signal_all.so python gloo_lost_send.py
#include <dlfcn.h>

#include <deque>
#include <exception>
#include <memory>

struct UnboundBuffer;
struct Pair;

struct Op {  // gloo/transport/tcp/pair.h
  char preamble[48];
  void* buf;
  std::weak_ptr<UnboundBuffer> ubuf;
  size_t nread, nwritten, offset, nbytes;
};
static_assert(sizeof(Op) == 0x68);
constexpr size_t RX = 0x2b8, TX = 0x320;  // read from the machine code of Pair::read and Pair::sendAsyncMode

template <class Self>
using Signal = void (*)(Self*, std::exception_ptr);

template <class Self>
Signal<Self> find(const char* name) {
  return reinterpret_cast<Signal<Self>>(dlsym(dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD), name));
}

extern "C" void _ZN4gloo9transport3tcp4Pair15signalExceptionENSt15__exception_ptr13exception_ptrE(
    Pair* pair, std::exception_ptr ex) {
  static auto pairs = find<Pair>("_ZN4gloo9transport3tcp4Pair15signalExceptionENSt15__exception_ptr13exception_ptrE");
  static auto buffers = find<UnboundBuffer>(
      "_ZN4gloo9transport3tcp13UnboundBuffer15signalExceptionENSt15__exception_ptr13exception_ptrE");
  auto tell = [&](Op& op) {
    if (auto buffer = op.ubuf.lock()) buffers(buffer.get(), ex);
  };
  auto bytes = reinterpret_cast<char*>(pair);
  tell(*reinterpret_cast<Op*>(bytes + RX));
  for (auto& op : *reinterpret_cast<std::deque<Op>*>(bytes + TX)) tell(op);
  pairs(pair, ex);
}
