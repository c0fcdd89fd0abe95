// Memory for what lives during a call.
#pragma once

#include <memory>

#include "vector.h"

namespace gluon_amp {

constexpr size_t kAlignment = 64;
inline size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

class Buffer {
 public:
  explicit Buffer(size_t bytes) : memory_(new char[bytes + kAlignment]), data_(memory_.get()) {
    size_t room = bytes + kAlignment;
    std::align(kAlignment, bytes, data_, room);
  }
  void* data() const { return data_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  std::unique_ptr<char[]> memory_;
  void* data_;
};

}  // namespace gluon_amp
