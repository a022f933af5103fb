#pragma once

#include <unistd.h>

#include <memory>
#include <utility>

namespace fold3d::comm {

/// The process that made an object. A child that it forks has a copy of the object, but none of its threads: to join
/// one, or to destroy a condition or lock a mutex that one had, may never end there; and what processes share is the
/// parent's.
class OwnProcess {
 public:
  bool is_here() const { return ::getpid() == id_; }

 private:
  pid_t id_ = ::getpid();
};

/// std::make_shared for an object that has threads: in a forked child nothing of its copy is ever destroyed.
template <class Object, class... Arguments>
std::shared_ptr<Object> make_for_process(Arguments&&... arguments) {
  return {new Object(std::forward<Arguments>(arguments)...), [own = OwnProcess()](Object* object) {
            if (own.is_here()) delete object;
          }};
}

}  // namespace fold3d::comm
