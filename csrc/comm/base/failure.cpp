#include "comm/base/failure.h"

#include "comm/base/errors.h"

namespace fold3d::comm {

bool Failure::set(Kind kind, const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (set_.load(std::memory_order_relaxed)) return false;
  kind_ = kind;
  text_ = text;
  set_.store(true, std::memory_order_release);
  return true;
}

void Failure::check() const {
  if (!is_set()) return;
  switch (kind_) {
    case Kind::kTimeout:
      throw TimeoutError(text_);
    case Kind::kProtocol:
      throw ProtocolError(text_);
    case Kind::kAborted:
      throw AbortedError(text_);
    case Kind::kError:
      break;
  }
  throw CommError(text_);
}

}  // namespace fold3d::comm
